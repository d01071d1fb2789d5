"""Traces nested `tf.function`s and conditionals inline, so that a step's gradients and writes are in one graph.

Both branches of conditionals whose writes a step reads again, or that compute all gradients, are traced, and the
written values are selected.

    tf.cond(p, lambda: v.assign(f(x)), …)      becomes      v.assign(tf.where(p, f(x), v))

Batch statistics in a branch are then nodes of the step's graph, like all others, and cover the whole batch.
"""

from __future__ import annotations

import functools
import linecache
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe  # registers the function for forward derivatives of ops
from tensorflow.python.eager import forwardprop
from tensorflow.python.eager.polymorphic_function import function_type_utils  # binds the arguments of tf.function

from autodist.capture.graphs import is_of_function
from autodist.graph.jit_scope import JIT_SCOPE
from autodist.graph.ops import assigns, sums_in_place
from autodist.tf_compat.patches import (
    CAPTURE,
    COND,
    FORWARD_POP,
    FORWARD_PUSH,
    FUNCTION_CALL,
    LOAD_SOURCE,
    patched,
    put,
)


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
    """Makes converted functions leave no files; tracebacks, `inspect` and debuggers still show their code.

    TensorFlow writes the code of each converted function to a temporary file and removes it when Python exits, but not
    Python's bytecode of it. A process that is killed leaves both.
    """
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


@dataclass
class BranchesInGraph:
    """The conditionals of a step's graph that are traced with both branches.

    Attributes:
        names: names of the conditionals' nodes.
        made: names of those traced so far.
    """

    names: Collection[str]
    made: set[str] = field(default_factory=set)
    _conditions: list[tf.Tensor] = field(default_factory=list)

    def written(self, op_type: str, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Returns the inputs of an op.

        In a branch that is not taken, a write gets inputs that leave its variable as it is.
        """
        if not self._conditions or not assigns(op_type):
            return inputs
        handle, *at, value = inputs
        taken = functools.reduce(tf.logical_and, self._conditions)
        kept = tf.zeros_like(value)
        if not sums_in_place(op_type):
            kept = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
        return [handle, *at, tf.where(taken, value, kept)]

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Traces both branches of the conditionals while the context is open."""

        def cond(
            plain: Any, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any], name: str = "cond"
        ) -> Any:
            graph = tf.compat.v1.get_default_graph()
            node = graph.unique_name(name or "cond", mark_as_used=False)
            is_own = not is_of_function(getattr(graph, "outer_graph", None))
            if not is_own or not (self._conditions or node in self.names):
                return plain(pred, true_fn, false_fn, name)
            self.made.add(node)
            with tf.name_scope(name or "cond"):
                return self._both(plain, tf.convert_to_tensor(pred), true_fn, false_fn)

        with patched({COND: cond}):
            yield

    def _both(self, plain: Any, condition: tf.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        results = []
        for taken, branch in ((condition, true_fn), (tf.logical_not(condition), false_fn)):
            self._conditions.append(taken)
            try:
                results.append(branch())
            finally:
                self._conditions.pop()
        return tf.nest.map_structure(functools.partial(_chosen, plain, condition), *results)


def _chosen(plain: Any, condition: tf.Tensor, then: Any, other: Any) -> Any:
    if then is None or isinstance(then, tf.Operation):
        return then
    if not isinstance(then, tf.__internal__.CompositeTensor):
        shapes = [tf.TensorShape(getattr(one, "shape", ())) for one in (then, other)]
        if shapes[0] == shapes[1] and shapes[0].is_fully_defined():
            return tf.where(condition, then, other)
    return plain(condition, lambda: then, lambda: other)  # the branches may return different numbers of rows
