"""Nested `tf.function`s are taken inline while a step is captured, so that gradients and writes lie in one graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf
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

    with replaced(kind, "__call__", call):
        yield
