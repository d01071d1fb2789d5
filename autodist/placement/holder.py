"""Holder: the groups that hold the slices of a variable's value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from autodist.placement.group import Group
from autodist.placement.partitioning import Partitioning, shard_name


class Copy(NamedTuple):
    """A copy of a slice that workers hold in addition.

    Attributes:
        suffix: of its name, after that of the slice.
        encoding: the compressor that rounds the copy's value (`Compressor.encoding`); "": it has the slice's value.
        is_at_owner: False if all workers but the owner of the slice hold it, where it would have the slice's value.
    """

    suffix: str
    encoding: str = ""
    is_at_owner: bool = True

    def is_held_by(self, worker: int, owner: int | None) -> bool:
        """Returns True if a worker holds the copy; `owner` is that of the slice."""
        return self.is_at_owner or worker != owner

    @staticmethod
    def held_beside(name: str, copies: Iterable[Copy], worker: int, owner: int | None) -> list[Copy]:
        """Returns the copies of a slice that a worker holds, each under its full name as the suffix.

        Args:
            name: of the slice.
            copies: all copies of it.
            worker: the worker.
            owner: of the slice; None: every worker holds it.
        """
        return [copy._replace(suffix=name + copy.suffix) for copy in copies if copy.is_held_by(worker, owner)]


@dataclass(frozen=True)
class Slice:
    """A slice of a variable's value, which the session stores as a variable of its own.

    Attributes:
        name: suffix after the name of the variable; "" if the slice is the whole value.
        begin: its start in the value, on each axis.
        shape: its length on each axis.
        group: the places that hold it.
        copies: the copies that workers hold in addition.
        is_on_places: True if each worker holds it on the device of its first place in the group, as on a mesh; False if
            on its first device.
    """

    name: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    group: Group
    copies: tuple[Copy, ...] = ()
    is_on_places: bool = False

    @property
    def place(self) -> tuple[slice, ...]:
        """The index with which an array of the whole value yields the slice."""
        return tuple(slice(start, start + length) for start, length in zip(self.begin, self.shape, strict=True))

    @property
    def owner(self) -> int | None:
        """The first worker of its group, from which the workers outside it read; None if every worker holds it."""
        return None if self.group.is_all else self.group.workers[0]

    def copy(self, suffix: str) -> Copy | None:
        """Returns the copy with a suffix, if there is one."""
        return next((copy for copy in self.copies if copy.suffix == suffix), None)

    def device(self, worker: int) -> str | None:
        """Returns the device on which a worker of the group holds the slice; None: on its first one."""
        ranks = self.group.ranks(worker) if self.is_on_places else ()
        return self.group.places[ranks[0]].device if ranks else None


@dataclass(frozen=True)
class Holder:
    """The groups that hold the value of one variable, slice by slice.

    Attributes:
        slices: the slices, in the order of their starts; one for a value that is not partitioned.
        axis: the axis along which they divide the value; None if it is whole, or divided along several axes.
        layer: the layer with which the whole value is gathered when a step uses it, from 1; 0: it is read separately.
    """

    slices: tuple[Slice, ...]
    axis: int | None = None
    layer: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int], group: Group, copies: Iterable[Copy] = ()) -> Holder:
        """Returns the holder of a value that is not partitioned."""
        return cls((Slice("", (0,) * len(shape), tuple(shape), group, tuple(copies)),))

    @classmethod
    def partitioned(cls, shape: Sequence[int], partitioning: Partitioning, groups: Iterable[Group]) -> Holder:
        """Returns the holder of a partitioned value; each shard has a group."""
        axis, slices = partitioning.axis, []
        bounds = zip(partitioning.starts, partitioning.sizes, groups, strict=True)
        for k, (start, size, group) in enumerate(bounds):
            begin = tuple(start if a == axis else 0 for a in range(len(shape)))
            length = tuple(size if a == axis else n for a, n in enumerate(shape))
            slices.append(Slice(shard_name("", k), begin, length, group))
        return cls(tuple(slices), axis)

    @classmethod
    def divided(cls, shape: Sequence[int], counts: Sequence[int], groups: Iterable[Group]) -> Holder:
        """Returns the holder of a value that a mesh divides evenly, in row-major order of its parts.

        Args:
            shape: of the whole value.
            counts: the number of parts along each axis.
            groups: the places that hold each part.
        """
        length = tuple(n // count for n, count in zip(shape, counts, strict=True))
        starts = product(*(range(0, n, part) for n, part in zip(shape, length, strict=True)))
        along = [axis for axis, count in enumerate(counts) if count > 1]
        slices = tuple(
            Slice(shard_name("", k), start, length, group, is_on_places=True)
            for k, (start, group) in enumerate(zip(starts, groups, strict=True))
        )
        return cls(slices, along[0] if len(along) == 1 else None)

    @cached_property
    def partitioning(self) -> Partitioning | None:
        """The axis along which the slices divide the value, and their lengths; None if there is no single axis."""
        axis = self.axis
        return None if axis is None else Partitioning(axis, tuple(one.shape[axis] for one in self.slices))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value, whose last slice ends where it does."""
        last = self.slices[-1]
        return tuple(start + length for start, length in zip(last.begin, last.shape, strict=True))

    @property
    def is_everywhere(self) -> bool:
        """True if every worker holds the whole value, and no copies of it."""
        return self.axis is None and len(self.slices) == 1 and self.slices[0].group.is_all and not self.slices[0].copies

    def is_held_by(self, worker: int) -> bool:
        """Returns True if a worker reads the whole value without another worker."""
        return all(one.owner in (None, worker) for one in self.slices)

    def with_groups(self, name: str, groups: Mapping[str, Group]) -> Holder:
        """Returns this holder of the variable `name` with other groups for some slices, by their full names."""
        return self._with(replace(one, group=groups.get(name + one.name, one.group)) for one in self.slices)

    def with_copies(self, name: str, copies: Mapping[str, Iterable[Copy]]) -> Holder:
        """Returns this holder of the variable `name` with copies of slices added, by their full names."""
        every = ((one, [*one.copies, *copies.get(name + one.name, ())]) for one in self.slices)
        by_suffix = ((one, {copy.suffix: copy for copy in some}) for one, some in every)
        return self._with(replace(one, copies=tuple(sorted(some.values()))) for one, some in by_suffix)

    def without_copies(self) -> Holder:
        """Returns this holder without cached copies."""
        return self._with(replace(one, copies=()) if one.copies else one for one in self.slices)

    def with_copies_of(self, other: Holder) -> Holder:
        """Returns this holder with the cached copies of `other` added, if both have the same slices."""
        theirs = {one.name: one.copies for one in other.slices}
        return self.with_copies("", theirs) if theirs.keys() == {one.name for one in self.slices} else self

    def _with(self, slices: Iterable[Slice]) -> Holder:
        return replace(self, slices=tuple(slices))
