"""Where each variable's value is: in the script's object, in the session, or newer in one of the two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from autodist.graph.placement import Placement, Shard

_OVERWRITES = ("assign",)
_CHANGES = (
    "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update", "scatter_nd_add", "scatter_nd_sub",
    "scatter_nd_update", "scatter_max", "scatter_min", "scatter_mul", "scatter_div", "batch_scatter_update",
)  # fmt: skip
_READS = ("value", "read_value", "read_value_no_copy", "numpy", "sparse_read", "gather_nd", "_read_variable_op")

LARGE = 1 << 20
"""Bytes from which an outdated value of the script's object is let go: the session has the true one."""


@dataclass(eq=False)
class Tracked:
    """A variable of the script that steps read or write.

    Attributes:
        source: the script's object.
        shared_name: under which the session knows it, the same on all workers.
        placement: where its value lies in the session; at every worker until a step says otherwise.
        is_settled: whether a step that trains it, or that keeps something for one that does, has decided the placement.
        is_ahead: Python assigned it, and the session is to be told (true at first).
        is_behind: a step wrote it, and the script's object has an older value.
    """

    source: tf.Variable
    shared_name: str
    placement: Placement = field(default_factory=Placement)
    is_settled: bool = False
    is_ahead: bool = True
    is_behind: bool = False

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts in which the session keeps it."""
        return tuple(self.placement.shards(self.source.shape.as_list()))

    @property
    def byte_size(self) -> int:
        return int(self.source.shape.num_elements()) * self.source.dtype.size

    def read(self) -> tf.Tensor:
        """The value in the script's object."""
        return tf.raw_ops.ReadVariableOp(resource=self.source.handle, dtype=self.source.dtype.base_dtype)

    def write(self, value: Any) -> None:
        """Gives the script's object a value that a step made."""
        tensor = tf.convert_to_tensor(value, self.source.dtype.base_dtype)
        tf.raw_ops.AssignVariableOp(resource=self.source.handle, value=tensor)

    def fall_behind(self) -> None:
        """Notes that a step wrote the variable, and lets go of a large value that is now outdated."""
        if not self.is_behind and self.byte_size >= LARGE:
            empty = tf.zeros([0], self.source.dtype.base_dtype)
            tf.raw_ops.AssignVariableOp(resource=self.source.handle, value=empty)
        self.is_behind = True

    def hand_over(self, *, is_same: bool) -> None:
        """Notes that the session has a value, and lets go of a large one of the script's object.

        Args:
            is_same: whether it is the object's own, which then is up to date where it is kept.
        """
        self.is_ahead = False
        if not is_same or self.byte_size >= LARGE:
            self.fall_behind()


class VariableTracker:
    """Notices when Python reads or assigns variables that steps work on.

    Reading one that is behind brings all values up to date first; assigning one marks it, so that the next step sees
    it.

    Args:
        pull: brings the objects of variables that are behind up to date.
    """

    def __init__(self, pull: Callable[[], None]) -> None:
        self._pull = pull
        self._by_id: dict[int, Tracked] = {}
        self._stop_watching_functions = _before_function_calls(self.catch_up)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._by_id.values())

    def track(self, source: tf.Variable, name: str) -> Tracked:
        """The record of a variable; made, and the variable watched, when it is first seen."""
        found = self._by_id.get(id(source))
        if found is None:
            found = Tracked(source, f"variable_{len(self._by_id)}/{name}")
            self._by_id[id(source)] = found
            self._watch(found)
        return found

    def catch_up(self) -> None:
        if any(t.is_behind for t in self._by_id.values()):
            self._pull()

    def forget(self) -> None:
        """Leaves the variables as plain objects again."""
        self._stop_watching_functions()
        for tracked in self._by_id.values():
            for name in (*_OVERWRITES, *_CHANGES, *_READS):
                vars(tracked.source).pop(name, None)
        self._by_id.clear()

    def _watch(self, tracked: Tracked) -> None:
        for names, before in ((_READS, self._on_read), (_OVERWRITES, self._on_overwrite), (_CHANGES, self._on_change)):
            for name in names:
                plain = getattr(tracked.source, name, None)
                if plain is not None:
                    vars(tracked.source)[name] = _with(plain, functools.partial(before, tracked))

    def _on_read(self, tracked: Tracked) -> None:
        if tracked.is_behind and tf.executing_eagerly():
            self._pull()

    def _on_overwrite(self, tracked: Tracked) -> None:
        if tf.executing_eagerly():
            tracked.is_ahead, tracked.is_behind = True, False

    def _on_change(self, tracked: Tracked) -> None:
        if tf.executing_eagerly():
            self._on_read(tracked)
            self._on_overwrite(tracked)


def _with(plain: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        return plain(*args, **kwargs)

    return call


def _before_function_calls(catch_up: Callable[[], None]) -> Callable[[], None]:
    """A `tf.function` of the script reads variables without asking their objects; `catch_up` runs before each call."""
    kind = type(tf.function(lambda: None))
    plain = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            catch_up()
        return plain(self, *args, **kwargs)

    kind.__call__ = call

    def restore() -> None:
        if kind.__call__ is call:
            kind.__call__ = plain

    return restore
