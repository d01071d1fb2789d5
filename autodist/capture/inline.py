"""Traces nested `tf.function`s inline while a step is captured, so that gradients and writes are in one graph.

Also loads AutoGraph's generated code from memory. TensorFlow writes the code of each converted function to a temporary
file and removes it when Python exits, but not Python's bytecode of it. A process that is killed leaves both.
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
from tensorflow.python import pywrap_tfe  # registers the function for forward derivatives of ops
from tensorflow.python.eager import forwardprop
from tensorflow.python.eager.polymorphic_function import function_type_utils  # binds the arguments of tf.function

from autodist.graph.jit_scope import JIT_SCOPE
from autodist.tf_compat.patches import CAPTURE, FORWARD_POP, FORWARD_PUSH, FUNCTION_CALL, LOAD_SOURCE, patched, put


@contextmanager
def inlining_functions() -> Iterator[None]:
    """Traces the Python function of a `tf.function` into the current graph if it is called while a graph is built.

    AutoGraph converts the Python function as `tf.function` does. The operations of a function with `jit_compile=True`
    are in a marked name scope (`autodist.graph.jit_scope`).
    """

    def call(plain: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function() and tf.executing_eagerly():
            return plain(self, *args, **kwargs)
        status = tf.__internal__.autograph.control_status_ctx()
        body = self.python_function
        if getattr(self, "_autograph", True):
            body = tf.__internal__.autograph.tf_convert(body, status)
        if self.input_signature is not None:  # converts numbers to tensors
            bound = function_type_utils.bind_function_inputs(args, kwargs, self.function_type, self._default_values)
            args, kwargs = bound.args, bound.kwargs
        with tf.name_scope(JIT_SCOPE) if getattr(self, "_jit_compile", None) else nullcontext():
            return body(*args, **kwargs)

    with patched({FUNCTION_CALL: call}), _inlining_derivatives():
        yield


@contextmanager
def _inlining_derivatives() -> Iterator[None]:
    """Computes the derivatives of `tf.autodiff.ForwardAccumulator` in the graph instead of in functions.

    A function call takes all outputs of the op: the derivative of a gradient would then run after the gradient, like an
    update. Nested accumulators keep TensorFlow's calls.
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
        popped(pop, one)  # otherwise it would differentiate the derivative's ops
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
    """Makes converted functions leave no files; tracebacks, `inspect` and debuggers still show their code."""
    put(LOAD_SOURCE, _load_source)


def _load_source(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """Loads AutoGraph's code in place of TensorFlow's `load_source`; `delete_on_exit` finds no file to remove."""
    name = f"__autograph_generated_file{secrets.token_hex(6)}"
    file = os.path.join(tempfile.gettempdir(), f"{name}.py")  # only a name, which maps lines to the user's
    module = ModuleType(name)
    module.__file__ = file
    # None as the time: linecache then does not look for the file, as for code that Python loads without one.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  (as importing a file would)
    sys.modules[name] = module
    return module, file


@contextmanager
def naming_captures() -> Iterator[None]:
    """Names unnamed captured tensors `captured` while the context is open.

    TensorFlow numbers them by a counter of the process, so that workers with different histories would capture graphs
    with different names.
    """

    def capture(plain: Any, self: Any, tensor: Any, name: str | None = None, shape: Any = None) -> Any:
        if name is None and not hasattr(tensor, "graph"):
            name = "captured"
        return plain(self, tensor, name, shape)

    with patched({CAPTURE: capture}):
        yield
