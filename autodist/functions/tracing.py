"""Tracing of a step: options, cached traces and call forms, nested calls, and errors about unknown axis lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils as control  # reads and writes of an op or call
from tensorflow.python.framework.ops import EagerTensor  # the class of all eager tensors

from autodist.capture.training_hooks import is_distributing
from autodist.errors import AutoDistError, CaptureError
from autodist.logs.formatting import words_of
from autodist.tf_compat import plain_nests
from autodist.tf_compat.plain_nests import NotPlainError

_NO_LENGTH = re.compile(r"NoneType|None values|\(None\)|elements of \[[^]]*None|partially known|got None")
"""Matches error messages of TensorFlow and Python about an unknown length."""


@dataclass(frozen=True)
class Tracing:
    """Options for tracing a step, as for `tf.function`.

    Attributes:
        jit_compile: True to compile the step with XLA.
        input_signature: shapes and dtypes of all arguments, for a single trace; None: those of each call.
        reduce_retracing: True to trace calls with different shapes once more with unknown lengths.
        autograph: True to convert Python's control flow.
    """

    jit_compile: bool = False
    input_signature: Any = None
    reduce_retracing: bool = False
    autograph: bool = True

    def plain(self, function: Callable[..., Any]) -> Any:
        """Returns a `tf.function` with these options."""
        return tf.function(
            function, self.input_signature, self.autograph, self.jit_compile or None, self.reduce_retracing
        )


BY_ITSELF = Tracing()
"""The defaults of `tf.function`."""


@contextmanager
def explaining_open_axes() -> Iterator[None]:
    """Context that adds an explanation of None to errors raised because a step uses the length of a batch axis."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if _NO_LENGTH.search(words_of(error)) and not isinstance(error, AutoDistError):
            error.add_note(
                "AutoDist captures a step with its batch axis open: x.shape[0] of an argument x is None there. Use "
                "tf.shape(x)[0] instead, or -1 in tf.reshape."
            )
        raise


T = TypeVar("T")


class Same:
    """An unhashable object in the key of a trace: equal only to itself, and kept alive so that its `id` stays valid."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def constant_key(value: Any) -> Hashable:
    """Returns the form of a Python value in the key of a trace."""
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return value


@dataclass(frozen=True)
class TracedFor:
    """The key of a trace.

    Attributes:
        constants: Python values that are part of the step.
        axes: batch axis of each array.
        specs: shape and dtype of each array; the length of the batch axis is unknown.
        groups: group of each array with a batch axis; the arrays of a group have equal numbers of rows.
    """

    constants: Hashable
    axes: tuple[int | None, ...]
    specs: tuple[tf.TensorSpec, ...]
    groups: tuple[int, ...] = ()

    def takes(self, other: TracedFor) -> bool:
        """Returns True if a trace for this key is valid for the other."""
        return self._matches(other) and all(
            own.is_compatible_with(its) and _is_as_general(own.shape, its.shape)
            for own, its in zip(self.specs, other.specs, strict=True)
        )

    def together_with(self, other: TracedFor) -> TracedFor | None:
        """Returns a key valid for both, with unknown lengths where they differ; None if they differ in more."""
        if not self._matches(other):
            return None
        pairs = list(zip(self.specs, other.specs, strict=True))
        if any(a.dtype != b.dtype or a.shape.rank != b.shape.rank for a, b in pairs):
            return None
        specs = [tf.TensorSpec(a.shape.most_specific_compatible_shape(b.shape), a.dtype) for a, b in pairs]
        return TracedFor(self.constants, self.axes, tuple(specs), self.groups)

    def _matches(self, other: TracedFor) -> bool:
        return (self.constants, self.axes, self.groups) == (other.constants, other.axes, other.groups)


def _is_as_general(one: tf.TensorShape, other: tf.TensorShape) -> bool:
    return all(mine is None or mine == its for mine, its in zip(one, other, strict=True))


class Traces(Generic[T]):
    """The traces of a step.

    Args:
        reduces: True to trace calls with different shapes once more with unknown lengths, as
            `tf.function(reduce_retracing=True)` does.
    """

    def __init__(self, reduces: bool = False) -> None:
        self._reduces = reduces
        self._made: dict[TracedFor, T] = {}
        self._serving: dict[TracedFor, T] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key_of_call: TracedFor) -> T | None:
        """Returns the trace for a call; None if there is none yet."""
        if key_of_call not in self._serving:
            trace = next((made for key, made in self._made.items() if key.takes(key_of_call)), None)
            if trace is None:
                return None
            self._serving[key_of_call] = trace
        return self._serving[key_of_call]

    def to_be_made(self, key_of_call: TracedFor) -> TracedFor:
        """Returns the key to trace for a call without a valid trace."""
        for key in reversed(self._made if self._reduces else ()):
            together = key.together_with(key_of_call)
            if together is not None:
                return together
        return key_of_call

    def add(self, made_for: TracedFor, trace: T) -> None:
        """Adds a trace; replaces an earlier one with the same key."""
        self._made[made_for] = trace
        self._serving.clear()


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def form_of(arguments: Any) -> tuple[Hashable | None, list[Any]]:
    """Returns the form of a call, equal for calls that differ only in the values of their arrays, and these arrays.

    The form is the structure of the arguments, with shapes, dtypes, and the values of leaves that are not arrays. It
    takes a few microseconds; names, axes and specs of the leaves, and the key of a trace, take a hundred.

    Returns:
        The form, and the arrays in the order of `tf.nest`. None and no arrays for a leaf that is neither an array nor a
        plain Python value, or for a container that is no tuple, list or dictionary.
    """
    arrays: list[Any] = []

    def form_of_leaf(value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is EagerTensor:
            arrays.append(value)
            return kind, value.dtype, value._shape_tuple()
        if kind is np.ndarray or isinstance(value, np.generic):
            arrays.append(value)
            return kind, value.dtype, value.shape
        raise NotPlainError(kind.__name__)

    try:
        return plain_nests.form_of(arguments, form_of_leaf), arrays
    except NotPlainError:
        return None, []


def call_in_function(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Calls the plain `tf.function` of a step within another function.

    Within a captured step it is traced inline. Within a `tf.function` of the script, which this process runs alone, it
    computes its whole batch.

    Raises:
        CaptureError: the step trains, and would do so on this process alone.
    """
    if not is_distributing():
        trained = _trained_by(function.get_concrete_function(*args, **kwargs).graph)
        if trained:
            raise CaptureError(
                f"{name} trains {trained[0]} and is called within a tf.function, which this process runs alone, so "
                f"that it would train alone. Call {name} from Python, once for each batch. If the tf.function takes "
                f"one batch, replace it by @ad.function instead: {name} is then part of its step."
            )
    return function(*args, **kwargs)


def _trained_by(graph: Any) -> list[str]:
    """Returns the names of the trainable variables that a function's graph writes."""
    named = {id(v.handle): v.name for v in graph.variables if v.trainable}
    inner = {id(inside): named[id(outside)] for outside, inside in graph.captures if id(outside) in named}
    written = [t for op in graph.get_operations() for t in control.get_read_write_resource_inputs(op)[1]]
    return [inner[id(t)] for t in written if id(t) in inner]
