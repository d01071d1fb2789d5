"""Nested `tf.function`s are taken inline while a step is captured, so that gradients and writes lie in one graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe  # where TensorFlow asks for an op's derivative forwards
from tensorflow.python.eager import forwardprop
from tensorflow.python.eager.polymorphic_function import function_type_utils  # by which tf.function takes arguments

from autodist.capture.replaced import replaced
from autodist.graph.jit_scope import JIT_SCOPE


@contextmanager
def inlining_functions() -> Iterator[None]:
    """Within it, calling a `tf.function` while a graph is being built traces its Python function into that graph.

    AutoGraph is kept: the Python function is converted as `tf.function` would convert it. What it asks XLA to compile
    stands in a name scope that says so (`autodist.graph.jit_scope`).
    """
    kind = type(tf.function(lambda: None))
    plain = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function() and tf.executing_eagerly():
            return plain(self, *args, **kwargs)
        status = tf.__internal__.autograph.control_status_ctx()
        body = self.python_function
        if getattr(self, "_autograph", True):
            body = tf.__internal__.autograph.tf_convert(body, status)
        if self.input_signature is not None:  # by which numbers become tensors
            bound = function_type_utils.bind_function_inputs(args, kwargs, self.function_type, self._default_values)
            args, kwargs = bound.args, bound.kwargs
        with tf.name_scope(JIT_SCOPE) if getattr(self, "_jit_compile", None) else nullcontext():
            return body(*args, **kwargs)

    with replaced(kind, "__call__", call), _inlining_derivatives():
        yield


@contextmanager
def _inlining_derivatives() -> Iterator[None]:
    """Within it, what `tf.autodiff.ForwardAccumulator` computes of an op stands in the graph, and in no function.

    A call would take the op's outputs, whether it needs them or not: the derivative of a gradient would come after the
    gradient, as an update does. An accumulator within another one looks at calls.
    """
    kind, plain, active = forwardprop.ForwardAccumulator, forwardprop._jvp_dispatch, threading.local()
    push, pop = kind._push_accumulator, kind._pop_accumulator

    def pushed(self: Any) -> None:
        push(self)
        active.all = (*getattr(active, "all", ()), self)

    def popped(self: Any) -> None:
        pop(self)
        active.all = tuple(one for one in active.all if one is not self)

    def dispatch(op: str, attributes: Any, inputs: Any, outputs: Any, tangents: Any, use_batch: bool = False) -> Any:
        accumulators: tuple[Any, ...] = getattr(active, "all", ())
        if tf.executing_eagerly() or len(accumulators) != 1:
            return plain(op, attributes, inputs, outputs, tangents, use_batch)
        one = accumulators[0]
        popped(one)  # or it would ask for the derivatives of what computes the derivative
        try:
            return forwardprop._jvp_helper_wrapper(op, attributes, inputs, outputs, tangents, use_batch)
        finally:
            pushed(one)

    with replaced(kind, "_push_accumulator", pushed), replaced(kind, "_pop_accumulator", popped):
        pywrap_tfe.TFE_Py_RegisterJVPFunction(dispatch)
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_RegisterJVPFunction(plain)
