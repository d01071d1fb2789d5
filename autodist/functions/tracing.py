"""How a step is traced, and what is said where it cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import tensorflow as tf

_NO_LENGTH = re.compile(r"NoneType|None values|\(None\)|elements of \[[^]]*None|partially known|got None")
"""In what TensorFlow, and Python, say of a length that is not known."""


@dataclass(frozen=True)
class Tracing:
    """How a step is traced; as for `tf.function`.

    Attributes:
        jit_compile: whether XLA is to compile the step.
        input_signature: shapes and dtypes of all arguments, for which it is traced once; None: those that come.
        reduce_retracing: whether shapes that differ are traced once more as one.
        autograph: whether Python's control flow is converted.
    """

    jit_compile: bool = False
    input_signature: Any = None
    reduce_retracing: bool = False
    autograph: bool = True

    def plain(self, function: Callable[..., Any]) -> Any:
        """The `tf.function` that is traced so."""
        return tf.function(
            function, self.input_signature, self.autograph, self.jit_compile or None, self.reduce_retracing
        )


BY_ITSELF = Tracing()
"""As `tf.function` traces where nothing is asked for."""


@contextmanager
def explaining_open_axes() -> Iterator[None]:
    """What TensorFlow raises where a step uses the length of a batch axis says where a None comes from."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if _NO_LENGTH.search(str(error)):
            error.add_note(
                "AutoDist captures a step with its batch axis open: x.shape[0] of an argument x is None there. Write "
                "tf.shape(x)[0] for it, or -1 where tf.reshape is to find it."
            )
        raise


T = TypeVar("T")


class Same:
    """An object without a hash, in the key of a trace: equal to itself alone, and kept, so that its `id` stays its."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def constant_key(value: Any) -> Hashable:
    """What stands for a Python value in the key of a trace."""
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return value


@dataclass(frozen=True)
class TracedFor:
    """What a trace was made for.

    Attributes:
        constants: Python values that are part of the step.
        axes: for each array, along which it is split.
        specs: of each array, open along that axis.
        groups: of each array that is split, a number; those of one number have as many rows.
    """

    constants: Hashable
    axes: tuple[int | None, ...]
    specs: tuple[tf.TensorSpec, ...]
    groups: tuple[int, ...] = ()

    def takes(self, other: TracedFor) -> bool:
        """Whether what was traced for this serves the other."""
        return self._is_like(other) and all(
            mine.is_compatible_with(its) and _is_at_least_as_open(mine.shape, its.shape)
            for mine, its in zip(self.specs, other.specs, strict=True)
        )

    def together_with(self, other: TracedFor) -> TracedFor | None:
        """What serves both, lengths in which they differ left open; None if they differ in more."""
        if not self._is_like(other):
            return None
        pairs = list(zip(self.specs, other.specs, strict=True))
        if any(a.dtype != b.dtype or a.shape.rank != b.shape.rank for a, b in pairs):
            return None
        specs = [tf.TensorSpec(a.shape.most_specific_compatible_shape(b.shape), a.dtype) for a, b in pairs]
        return TracedFor(self.constants, self.axes, tuple(specs), self.groups)

    def _is_like(self, other: TracedFor) -> bool:
        return (self.constants, self.axes, self.groups) == (other.constants, other.axes, other.groups)


def _is_at_least_as_open(one: tf.TensorShape, other: tf.TensorShape) -> bool:
    return all(mine is None or mine == its for mine, its in zip(one, other, strict=True))


class Traces(Generic[T]):
    """The traces of a step.

    Args:
        reduces: whether shapes that differ are traced once more as one, lengths that differ left open, as
            `tf.function(reduce_retracing=True)` does.
    """

    def __init__(self, reduces: bool = False) -> None:
        self._reduces = reduces
        self._made: dict[TracedFor, T] = {}
        self._serving: dict[TracedFor, T] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, asked: TracedFor) -> T | None:
        """The trace that serves a call; None if there is none yet."""
        if asked not in self._serving:
            found = next((made for key, made in self._made.items() if key.takes(asked)), None)
            if found is None:
                return None
            self._serving[asked] = found
        return self._serving[asked]

    def to_be_made(self, asked: TracedFor) -> TracedFor:
        """What to trace for a call that none serves."""
        for key in reversed(self._made if self._reduces else ()):
            together = key.together_with(asked)
            if together is not None:
                return together
        return asked

    def add(self, made_for: TracedFor, made: T) -> None:
        """Serves with it from now on, in the place of an earlier one that was made for the same."""
        self._made[made_for] = made
        self._serving.clear()
