"""Watches eager operations and functions that read or write certain variables.

All uses of a variable in Python end in an operation or function that is executed with the variable's handle as an
input: `assign`, a slice's `assign`, a checkpoint that restores, a `tf.function` of the script. TensorFlow executes
them through three functions of one module, which every caller looks up there.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # holds the definitions of functions
from tensorflow.python.framework import auto_control_deps_utils as control  # TensorFlow's list of ops that only read

from autodist.graph.ops import Trait, having
from autodist.tf_compat.patches import EXECUTES, put

_QUERIES = having(Trait.QUERY) | {"DisableCopyOnRead"}
"""Operations that do not change the value, in addition to those that TensorFlow lists."""

_OVERWRITE = "AssignVariableOp"

_CHECK = "validate_shape"
"""Attribute of `_OVERWRITE`: True if the value must have the shape of the present one."""

_SEQUENCES = (list, tuple)


@dataclass(frozen=True)
class Watcher:
    """Callbacks for uses of a variable, called in the thread that uses it.

    Attributes:
        before_read: called before its value is read.
        after_write: called when it may have been written.
        after_alias: called when another object has taken its handle, and may read and write it unobserved.
    """

    before_read: Callable[[], None]
    after_write: Callable[[], None]
    after_alias: Callable[[], None]


@dataclass(frozen=True)
class _Entry:
    watcher: Watcher
    is_handle: bool  # False for the variable, which TensorFlow reads where it needs a tensor


_watched: dict[int, tuple[_Entry, ...]] = {}
"""Watched objects by `id`, which stays valid since the watching caller keeps them alive."""

_captured_by_data_sets: weakref.WeakValueDictionary[int, tf.Tensor] = weakref.WeakValueDictionary()
"""Handles captured by functions of data sets, by `id`; they hold them from their creation, often before watching."""

_thread = threading.local()


def watch(variable: tf.Variable, watcher: Watcher) -> Callable[[], None]:
    """Calls `watcher` from now on; returns a function that ends it. The caller keeps the variable alive until then."""
    begin()
    entries = {id(variable): _Entry(watcher, False), id(variable.handle): _Entry(watcher, True)}
    for key, entry in entries.items():
        _watched[key] = (*_watched.get(key, ()), entry)
    if id(variable.handle) in _captured_by_data_sets:
        watcher.after_alias()

    def end() -> None:
        for key, entry in entries.items():
            rest = tuple(e for e in _watched.get(key, ()) if e is not entry)
            if rest:
                _watched[key] = rest
            else:
                _watched.pop(key, None)

    return end


def is_watched(variable: tf.Variable) -> bool:
    """Returns True if some watcher is called for the uses of a variable."""
    return id(variable) in _watched


@contextmanager
def unwatched() -> Iterator[None]:
    """Context in which no watcher is called for this thread's operations."""
    before, _thread.is_busy = getattr(_thread, "is_busy", False), True
    try:
        yield
    finally:
        _thread.is_busy = before


@functools.cache
def begin() -> None:
    """Installs the watch in front of TensorFlow's execute functions; never removed, as others may wrap it later."""
    are_others: Callable[[Iterable[int]], bool] = _watched.keys().isdisjoint  # fast path of each eager operation
    fast, plain, cancelable = (row.plain() for row in EXECUTES)

    def execute_fast(*arguments: Any) -> Any:  # context, operation, name, then inputs and attributes
        if "Dataset" in arguments[1]:
            _note_data_set(arguments)
        if are_others(map(id, arguments)):
            for one in arguments:
                if type(one) in _SEQUENCES and not are_others(map(id, one)):
                    break
            else:
                return fast(*arguments)
        flat = [x for one in arguments for x in (one if type(one) in _SEQUENCES else (one,))]
        return _execute(fast, arguments, arguments[1], flat)

    def execute(*arguments: Any) -> Any:  # context, device, operation, inputs, …
        return plain(*arguments) if are_others(map(id, arguments[3])) else _execute(plain, arguments, *arguments[2:4])

    def execute_cancelable(*arguments: Any) -> Any:
        if are_others(map(id, arguments[3])):
            return cancelable(*arguments)
        return _execute(cancelable, arguments, *arguments[2:4])

    for row, replacement in zip(EXECUTES, (execute_fast, execute, execute_cancelable), strict=True):
        put(row, replacement)


def _note_data_set(arguments: Sequence[Any]) -> None:
    for one in arguments:
        for x in one if type(one) in _SEQUENCES else ():
            if isinstance(x, tf.Tensor) and x.dtype == tf.resource:
                _captured_by_data_sets[id(x)] = x


def _execute(run: Callable[..., Any], arguments: Sequence[Any], name: str | bytes, inputs: Sequence[Any]) -> Any:
    if getattr(_thread, "is_busy", False):
        return run(*arguments)
    operation = tf.compat.as_str(name)
    used = [(at, entry) for at, one in enumerate(inputs) for entry in _watched.get(id(one), ())]
    writes = _writes(operation)
    written = [e.watcher for at, e in used if e.is_handle and (writes is None or at in writes)]
    is_whole = operation == _OVERWRITE
    for _, entry in used:
        if not (is_whole and entry.is_handle):
            entry.watcher.before_read()
    try:
        outputs = run(*(_without_shape_check(arguments) if is_whole and written else arguments))
    except BaseException:
        _notify([] if is_whole else written)  # a function may have written before it failed
        raise
    _notify(written)
    if written and any(_is_handle(x) for x in tf.nest.flatten(outputs)):
        for watcher in written:
            watcher.after_alias()
    return outputs


def _without_shape_check(arguments: Sequence[Any]) -> list[Any]:
    """Returns the arguments of an assignment without the comparison with the present value, which may be freed.

    `tf.Variable.assign` itself compares with the shape of the variable. The attribute is among the arguments, or in a
    tuple of them.
    """
    changed = [[*one] if type(one) is tuple else one for one in arguments]
    for some in (changed, *(one for one in changed if type(one) is list)):
        for k, one in enumerate(some):
            if type(one) is str and one == _CHECK:
                some[k + 1] = False
    return [tuple(one) if type(plain) is tuple else one for one, plain in zip(changed, arguments, strict=True)]


def _notify(written: Iterable[Watcher]) -> None:
    for watcher in written:
        watcher.after_write()


def _is_handle(output: Any) -> bool:
    return isinstance(output, tf.Tensor) and output.dtype in (tf.resource, tf.variant)


@functools.lru_cache(maxsize=4096)
def _writes(operation: str) -> frozenset[int] | None:
    """Returns the inputs that an operation or function may write; None for any input."""
    if _only_reads(operation):
        return frozenset()
    if not context.context().has_function(operation):
        return None
    definition = context.context().get_function_def(operation)
    handles = {
        a.name: at for at, a in enumerate(definition.signature.input_arg) if a.type == tf.resource.as_datatype_enum
    }
    written = {handles[source] for source in definition.ret.values() if source in handles}
    for node in definition.node_def:
        if not _only_reads(node.op):
            only_read = set(node.attr[control.READ_ONLY_RESOURCE_INPUTS_ATTR].list.i)
            written |= {handles[x] for at, x in enumerate(node.input) if x in handles and at not in only_read}
    return frozenset(written)


def _only_reads(operation: str) -> bool:
    return operation in control.RESOURCE_READ_OPS or operation in _QUERIES
