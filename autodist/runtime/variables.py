"""Tracks the newest value of each variable: in the script's object or in the session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.placement.group import Group
from autodist.placement.holder import Holder, Slice
from autodist.runtime.deferred_values import deferred, discard
from autodist.runtime.eager_watch import Watcher, begin, unwatched, watch

LARGE = 1 << 20
"""Size in bytes from which an outdated value of the script's object is freed; the session has the current one."""


@dataclass(frozen=True)
class StoredVariable:
    """A variable as the session stores it.

    Attributes:
        shared_name: name in the session, equal on all workers.
        dtype: dtype of the variable.
        shape: shape of the complete variable.
        holder: the groups that hold the value.
        on_cpu: True if the variable stays on its workers' CPUs, whatever its dtype.
    """

    shared_name: str
    dtype: tf.DType
    shape: tuple[int, ...]
    holder: Holder
    on_cpu: bool = False

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices in which the session stores it."""
        return self.holder.slices


@dataclass(eq=False)
class TrackedVariable:
    """A variable of the script that steps read or write.

    Attributes:
        source: the script's object.
        shared_name: name in the session, equal on all workers.
        holder: the groups that hold the value in the session; every worker until a step decides otherwise.
        is_settled: True if a step that trains it, or that stores state for such a step, has decided the holder.
        is_ahead: True if Python has assigned a value that the session does not have yet (initially true).
        is_alike: True if every worker assigns the value that is ahead, so that none needs the chief's.
        is_reset: True if every worker has set it to zero and the session does not have that yet; a later write by this
            worker's script alone leaves it so.
        is_behind: True if a step of this worker has written it, so that the script's object has an older value.
        is_asynchronous: True if steps of other workers write it as well, at any time.
        is_aliased: True if another object holds its handle (for example a data set's function) and uses it unobserved.
        known: value of an aliased variable when it was last compared; the session has it, too.
        is_seed: True for the state of a random generator.
    """

    source: tf.Variable
    shared_name: str
    holder: Holder
    is_settled: bool = False
    is_ahead: bool = True
    is_alike: bool = False
    is_reset: bool = False
    is_behind: bool = False
    is_asynchronous: bool = False
    is_aliased: bool = False
    known: np.ndarray | None = None
    is_seed: bool = False

    @property
    def may_be_behind(self) -> bool:
        """True if the session may have a newer value than the script's object."""
        return self.is_behind or (self.is_asynchronous and not self.is_ahead)

    @property
    def stored(self) -> StoredVariable:
        """The variable as the session stores it."""
        shape = tuple(self.source.shape.as_list())
        return StoredVariable(self.shared_name, self.source.dtype.base_dtype, shape, self.holder)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices in which the session stores it."""
        return self.holder.slices

    @property
    def byte_size(self) -> int:
        return int(self.source.shape.num_elements()) * self.source.dtype.size

    def read(self) -> tf.Tensor:
        """Returns the value in the script's object, or the one that is deferred."""
        later = deferred(self.source)
        if later is not None:
            return later.compute()
        with unwatched():
            return tf.raw_ops.ReadVariableOp(resource=self.source.handle, dtype=self.source.dtype.base_dtype)

    def write(self, value: Any) -> None:
        """Writes a value computed by a step to the script's object."""
        discard(self.source)
        with unwatched():
            tensor = tf.convert_to_tensor(value, self.source.dtype.base_dtype)
            tf.raw_ops.AssignVariableOp(resource=self.source.handle, value=tensor)

    def fall_behind(self) -> None:
        """Marks the variable as written by a step, and frees a large value, which is now outdated."""
        discard(self.source)
        if not self.is_behind and not self.is_aliased and self.byte_size >= LARGE:
            self.write(tf.zeros([0], self.source.dtype.base_dtype))
        self.is_behind = True

    def hand_over(self, *, is_same: bool) -> None:
        """Marks the session's value as current, and frees a large value of the script's object.

        Args:
            is_same: True if the script's object has the same value, which stays current unless it is freed.
        """
        self.is_ahead = self.is_alike = self.is_reset = False
        if not is_same or self.byte_size >= LARGE or deferred(self.source) is not None:
            self.fall_behind()


class VariableTracker:
    """Detects reads and writes by Python of variables that steps use.

    Reading a variable that is behind updates it first, with others; writing one marks it, so that the next step uses
    the new value. Uses of a handle that another object has stored are not observed: such a variable is updated after
    each step, and its value compared before the next.

    Args:
        pull: updates variables that are behind: all, or at least the one that is read, the argument.
        workers: number of workers, which hold each variable at first.
    """

    def __init__(self, pull: Callable[[TrackedVariable | None], None], workers: int) -> None:
        begin()
        self._pull, self._everyone = pull, Group.all_workers(workers)
        self._by_id: dict[int, TrackedVariable] = {}
        self._aliased: list[TrackedVariable] = []
        self._ends: list[Callable[[], None]] = []
        self._awaited: dict[str, np.ndarray] = {}

    def __iter__(self) -> Iterator[TrackedVariable]:
        return iter(self._by_id.values())

    def of(self, source: tf.Variable) -> TrackedVariable | None:
        """Returns the record of a variable; None if no step uses it."""
        return self._by_id.get(id(source))

    def track(self, source: tf.Variable, is_seed: bool = False) -> TrackedVariable:
        """Returns the record of a variable; creates it and watches the variable on the first call."""
        tracked = self._by_id.get(id(source))
        if tracked is None:
            holder = Holder.whole(source.shape.as_list(), self._everyone)
            tracked = TrackedVariable(source, f"variable_{len(self._by_id)}", holder, is_seed=is_seed)
            self._by_id[id(source)] = tracked
            self._ends.append(watch(source, self._watcher(tracked)))
            if is_seed:
                self._resume()
        return tracked

    @property
    def generators(self) -> dict[str, TrackedVariable]:
        """The states of random generators, by names that are the same in every run of a script."""
        states: dict[str, TrackedVariable] = {}
        for tracked in self._by_id.values():
            if tracked.is_seed:
                name = tracked.source.name.removesuffix(":0")
                same = sum(known.partition("#")[0] == name for known in states)
                states[f"{name}#{same}"] = tracked
        return states

    def resume(self, states: Mapping[str, np.ndarray]) -> None:
        """Restores the states of generators by name, now or when a step tracks them."""
        self._awaited = dict(states)
        self._resume()

    def _resume(self) -> None:
        for name, tracked in self.generators.items():
            state = self._awaited.pop(name, None)
            if state is not None and state.shape == tuple(tracked.source.shape):
                tracked.source.assign(state)

    def mark_reset(self, sources: Iterable[tf.Variable]) -> None:
        """Marks those variables that Python has just set to zero, on every worker alike."""
        for tracked in map(self.of, sources):
            if tracked is not None and tracked.is_ahead and not tracked.is_aliased and not tracked.is_asynchronous:
                tracked.is_alike = not np.any(tracked.read())
                tracked.is_reset |= tracked.is_alike

    def compare_aliased(self) -> None:
        """Marks aliased variables whose value has changed since the last step."""
        for tracked in self._aliased:
            if not tracked.is_ahead and not _is_same(tracked.known, np.asarray(tracked.read())):
                tracked.is_ahead = True

    def refresh_aliased(self) -> None:
        """Updates aliased variables, which may be read unobserved."""
        if any(t.may_be_behind for t in self._aliased):
            self._pull(None)
        for tracked in self._aliased:
            tracked.known = np.array(tracked.read())

    def fall_behind(self) -> None:
        """Marks all variables that Python has not assigned as written by the session."""
        for tracked in self:
            if not tracked.is_ahead:
                tracked.fall_behind()
        self.refresh_aliased()

    def forget(self) -> None:
        """Stops watching the variables."""
        for end in self._ends:
            end()
        self._ends.clear()
        self._aliased.clear()
        self._by_id.clear()

    def _watcher(self, tracked: TrackedVariable) -> Watcher:
        def before_read() -> None:
            if tracked.may_be_behind:
                self._pull(tracked)

        def after_write() -> None:
            tracked.is_ahead, tracked.is_behind, tracked.is_alike = True, False, False

        def after_alias() -> None:
            if not tracked.is_aliased:
                tracked.is_aliased = True
                self._aliased.append(tracked)

        return Watcher(before_read, after_write, after_alias)


def _is_same(one: np.ndarray | None, other: np.ndarray) -> bool:
    """Returns True if two values are equal, bit by bit for numbers, so that NaN equals NaN."""
    if one is None or other.dtype.hasobject:
        return one is not None and np.array_equal(one, other)
    return one.tobytes() == other.tobytes()
