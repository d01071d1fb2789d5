"""Holders for tests, in one line."""

from __future__ import annotations

from collections.abc import Sequence

from autodist.placement.group import Group
from autodist.placement.holder import Copy, Holder
from autodist.placement.partitioning import Partitioning

Owners = Sequence[int | tuple[int, ...] | None]


def held_by(
    shape: Sequence[int],
    owners: Owners = (None,),
    partitioning: Partitioning | None = None,
    workers: int = 2,
    copies: Sequence[Sequence[str]] = (),
) -> Holder:
    """Returns the holder of a value.

    Args:
        shape: of the value.
        owners: for each slice, the worker or workers that hold it; None: all `workers`.
        partitioning: None: the value is whole.
        copies: for each slice, suffixes of copies, which have its value.
    """
    groups = [
        Group.all_workers(workers) if one is None else Group.of_workers(one if isinstance(one, tuple) else (one,))
        for one in owners
    ]
    if partitioning is None:
        return Holder.whole(shape, groups[0], *(map(Copy, some) for some in copies))
    found = Holder.partitioned(shape, partitioning, groups)
    return found.with_copies(
        "", {one.name: list(map(Copy, some)) for one, some in zip(found.slices, copies, strict=False)}
    )
