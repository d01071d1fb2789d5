"""What a step was traced for: each shape by itself or, where that is asked for, shapes that differ as one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import tensorflow as tf

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
