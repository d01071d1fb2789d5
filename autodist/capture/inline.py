"""Nested `tf.function`s are taken inline while a step is captured, so that gradients and writes lie in one graph.

AutoGraph's generated code, loaded from memory.

TensorFlow writes the code of each converted function to a temporary file and removes that when Python ends; the
bytecode that Python puts beside it stays. A process that is ended by a signal leaves them all, so none are made here.
"""

from __future__ import annotations

import linecache
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe  # where TensorFlow asks for an op's derivative forwards
from tensorflow.python.autograph.pyct import loader  # where AutoGraph loads what it has generated
from tensorflow.python.eager import forwardprop
from tensorflow.python.eager.polymorphic_function import function_type_utils  # by which tf.function takes arguments

from autodist.capture.patches import CAPTURE, FORWARD_POP, FORWARD_PUSH, FUNCTION_CALL, patched
from autodist.graph.jit_scope import JIT_SCOPE


@contextmanager
def inlining_functions() -> Iterator[None]:
    """Within it, calling a `tf.function` while a graph is being built traces its Python function into that graph.

    AutoGraph is kept: the Python function is converted as `tf.function` would convert it. What it asks XLA to compile
    stands in a name scope that says so (`autodist.graph.jit_scope`).
    """

    def call(plain: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
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

    with patched({FUNCTION_CALL: call}), _inlining_derivatives():
        yield


@contextmanager
def _inlining_derivatives() -> Iterator[None]:
    """Within it, what `tf.autodiff.ForwardAccumulator` computes of an op stands in the graph, and in no function.

    A call would take the op's outputs, whether it needs them or not: the derivative of a gradient would come after the
    gradient, as an update does. An accumulator within another one looks at calls.
    """
    plain, active = forwardprop._jvp_dispatch, threading.local()
    pop = forwardprop.ForwardAccumulator._pop_accumulator
    push = forwardprop.ForwardAccumulator._push_accumulator

    def pushed(push: Any, self: Any) -> None:
        push(self)
        active.all = (*getattr(active, "all", ()), self)

    def popped(pop: Any, self: Any) -> None:
        pop(self)
        active.all = tuple(one for one in active.all if one is not self)

    def dispatch(op: str, attributes: Any, inputs: Any, outputs: Any, tangents: Any, use_batch: bool = False) -> Any:
        accumulators: tuple[Any, ...] = getattr(active, "all", ())
        if tf.executing_eagerly() or len(accumulators) != 1:
            return plain(op, attributes, inputs, outputs, tangents, use_batch)
        one = accumulators[0]
        popped(pop, one)  # or it would ask for the derivatives of what computes the derivative
        try:
            return forwardprop._jvp_helper_wrapper(op, attributes, inputs, outputs, tangents, use_batch)
        finally:
            pushed(push, one)

    with patched({FORWARD_PUSH: pushed, FORWARD_POP: popped}):
        pywrap_tfe.TFE_Py_RegisterJVPFunction(dispatch)
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_RegisterJVPFunction(plain)


def load_generated_code_from_memory() -> None:
    """From now on converted functions leave no file; tracebacks, `inspect` and debuggers still show their code."""
    loader.load_source = _load_source


def _load_source(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """Stands in place of TensorFlow's `load_source`; there is no file that `delete_on_exit` could be about."""
    name = f"__autograph_generated_file{secrets.token_hex(6)}"
    file = os.path.join(tempfile.gettempdir(), f"{name}.py")  # only a name, by which lines are mapped to the user's
    module = ModuleType(name)
    module.__file__ = file
    # Without a time, so that the lines are not looked for on the disk. (Python's own way for code that has no file.)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  (as importing a file would)
    sys.modules[name] = module
    return module, file


@contextmanager
def naming_captures() -> Iterator[None]:
    """Within it, a captured tensor that nobody names is `captured`, where TensorFlow takes a number that counts what
    the process has done so far: workers that have done other things would capture graphs of different names."""

    def capture(plain: Any, self: Any, tensor: Any, name: str | None = None, shape: Any = None) -> Any:
        if name is None and not hasattr(tensor, "graph"):
            name = "captured"
        return plain(self, tensor, name, shape)

    with patched({CAPTURE: capture}):
        yield
