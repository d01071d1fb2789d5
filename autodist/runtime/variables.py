"""Where each variable's value is: in the script's object, in the session, or newer in one of the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.graph.placement import Placement, Shard
from autodist.runtime.eager_watch import Watcher, begin, unwatched, watch

LARGE = 1 << 20
"""Bytes from which an outdated value of the script's object is let go: the session has the true one."""


@dataclass(frozen=True)
class Kept:
    """A variable's value as the session has it.

    Attributes:
        shared_name: under which the session knows it, the same on all workers.
        dtype: its type.
        shape: of the whole.
        placement: where it lies.
        on_cpu: whether it stays on its workers' CPUs, whatever its type.
    """

    shared_name: str
    dtype: tf.DType
    shape: tuple[int, ...]
    placement: Placement
    on_cpu: bool = False

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts in which the session keeps it."""
        return tuple(self.placement.shards(self.shape))


@dataclass(eq=False)
class Tracked:
    """A variable of the script that steps read or write.

    Attributes:
        source: the script's object.
        shared_name: under which the session knows it, the same on all workers.
        placement: where its value lies in the session; at every worker until a step says otherwise.
        is_settled: whether a step that trains it, or that keeps something for one that does, has decided the placement.
        is_ahead: Python assigned it, and the session is to be told (true at first).
        is_behind: a step of this worker wrote it, and the script's object has an older value.
        is_asynchronous: steps of other workers write it as well, whatever this one does meanwhile.
        is_aliased: something else has its handle, too (a data set's function, say), and uses it unseen.
        known: of an aliased variable, the value when it was last compared, which the session has as well.
        is_seed: whether it is a random generator's state.
    """

    source: tf.Variable
    shared_name: str
    placement: Placement = field(default_factory=Placement)
    is_settled: bool = False
    is_ahead: bool = True
    is_behind: bool = False
    is_asynchronous: bool = False
    is_aliased: bool = False
    known: np.ndarray | None = None
    is_seed: bool = False

    @property
    def may_be_behind(self) -> bool:
        """Whether the session may have a newer value than the script's object."""
        return self.is_behind or (self.is_asynchronous and not self.is_ahead)

    @property
    def kept(self) -> Kept:
        """How the session has it."""
        shape = tuple(self.source.shape.as_list())
        return Kept(self.shared_name, self.source.dtype.base_dtype, shape, self.placement)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts in which the session keeps it."""
        return self.kept.shards

    @property
    def byte_size(self) -> int:
        return int(self.source.shape.num_elements()) * self.source.dtype.size

    def read(self) -> tf.Tensor:
        """The value in the script's object."""
        with unwatched():
            return tf.raw_ops.ReadVariableOp(resource=self.source.handle, dtype=self.source.dtype.base_dtype)

    def write(self, value: Any) -> None:
        """Gives the script's object a value that a step made."""
        with unwatched():
            tensor = tf.convert_to_tensor(value, self.source.dtype.base_dtype)
            tf.raw_ops.AssignVariableOp(resource=self.source.handle, value=tensor)

    def fall_behind(self) -> None:
        """Notes that a step wrote the variable, and lets go of a large value that is now outdated."""
        if not self.is_behind and not self.is_aliased and self.byte_size >= LARGE:
            self.write(tf.zeros([0], self.source.dtype.base_dtype))
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
    """Notices when Python, or what Python runs, reads or writes variables that steps work on.

    Reading one that is behind brings all values up to date first; writing one marks it, so that the next step sees it.
    What keeps the variable's handle for itself is not seen: a variable whose handle was given away is brought up to
    date after each step, and its value compared before the next.

    Args:
        pull: brings the objects of variables that are behind up to date: all that may be, or those that one asks for
            which is read.
    """

    def __init__(self, pull: Callable[[Tracked | None], None]) -> None:
        begin()
        self._pull = pull
        self._by_id: dict[int, Tracked] = {}
        self._aliased: list[Tracked] = []
        self._ends: list[Callable[[], None]] = []
        self._awaited: dict[str, np.ndarray] = {}

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._by_id.values())

    def of(self, source: tf.Variable) -> Tracked | None:
        """The record of a variable; None: no step works on it."""
        return self._by_id.get(id(source))

    def track(self, source: tf.Variable, is_seed: bool = False) -> Tracked:
        """The record of a variable; made, and the variable watched, when it is first seen."""
        found = self._by_id.get(id(source))
        if found is None:
            found = Tracked(source, f"variable_{len(self._by_id)}", is_seed=is_seed)
            self._by_id[id(source)] = found
            self._ends.append(watch(source, self._watcher(found)))
            if is_seed:
                self._resume()
        return found

    @property
    def generators(self) -> dict[str, Tracked]:
        """The states of random generators, by names that are the same in every run of a script."""
        found: dict[str, Tracked] = {}
        for tracked in self._by_id.values():
            if tracked.is_seed:
                name = tracked.source.name.removesuffix(":0")
                same = sum(known.partition("#")[0] == name for known in found)
                found[f"{name}#{same}"] = tracked
        return found

    def resume(self, states: Mapping[str, np.ndarray]) -> None:
        """Gives generators, by their names, the states that they had, now or when a step has them."""
        self._awaited = dict(states)
        self._resume()

    def _resume(self) -> None:
        for name, tracked in self.generators.items():
            state = self._awaited.pop(name, None)
            if state is not None and state.shape == tuple(tracked.source.shape):
                tracked.source.assign(state)

    def look_at_aliased(self) -> None:
        """Marks variables that were written unseen since the last step."""
        for tracked in self._aliased:
            if not tracked.is_ahead and not _is_same(tracked.known, np.asarray(tracked.read())):
                tracked.is_ahead = True

    def refresh_aliased(self) -> None:
        """Brings variables up to date that may be read unseen."""
        if any(t.may_be_behind for t in self._aliased):
            self._pull(None)
        for tracked in self._aliased:
            tracked.known = np.array(tracked.read())

    def forget(self) -> None:
        """Leaves the variables as plain objects again."""
        for end in self._ends:
            end()
        self._ends.clear()
        self._aliased.clear()
        self._by_id.clear()

    def _watcher(self, tracked: Tracked) -> Watcher:
        def before_read() -> None:
            if tracked.may_be_behind:
                self._pull(tracked)

        def after_write() -> None:
            tracked.is_ahead, tracked.is_behind = True, False

        def after_alias() -> None:
            if not tracked.is_aliased:
                tracked.is_aliased = True
                self._aliased.append(tracked)

        return Watcher(before_read, after_write, after_alias)


def _is_same(one: np.ndarray | None, other: np.ndarray) -> bool:
    """Whether two values are one, to the bit where they are numbers: NaN is NaN."""
    if one is None or other.dtype.hasobject:
        return one is not None and np.array_equal(one, other)
    return one.tobytes() == other.tobytes()
