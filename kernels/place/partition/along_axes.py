"""Variables that a mesh divides along several axes, in runs that only set them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.placement.partitioning import Partitioning, shard_name

Partition = Callable[[PlacedStep, str], PlacedStep]
"""Partitions the variables of a step by the partitionings of their holders; takes a label for new nodes, too."""

_Begins = Mapping[str, tuple[int, ...]]
"""The start of each shard of a variable, by the suffix of its name."""

_SOME_GROUP = Group.of_workers([0])
"""Stands for the groups of shards while a variable is partitioned, which does not depend on them."""


def partition_along_axes(step: PlacedStep, partition: Partition) -> PlacedStep:
    """Partitions variables whose slices differ along several axes, along one axis after the other.

    Each shard is stored under the name of the slice that it is.

        v ← f    becomes    v/shard_0/shard_0 ← f[:n, :m],  v/shard_0/shard_1 ← f[:n, m:],  …

    Args:
        step: the step.
        partition: partitions variables along one axis each.
    """
    divided = {
        name: one
        for name, one in step.holders.items()
        if name in step.by_name and one.partitioning is None and len(one.slices) > 1
    }
    if not divided:
        return step
    made = step
    begins: dict[str, _Begins] = {name: {"": (0,) * len(one.shape)} for name, one in divided.items()}
    for axis in range(max(len(one.shape) for one in divided.values())):
        cuts = {name: cut for name, one in divided.items() if (cut := _partitioning_along(axis, one)) is not None}
        shards = [(name, suffix, cut) for name, cut in cuts.items() for suffix in begins[name]]
        holders = {
            name + suffix: Holder.partitioned(made.by_name[name + suffix].shape, cut, [_SOME_GROUP] * len(cut.sizes))
            for name, suffix, cut in shards
        }
        begins |= {name: _begins_of_shards(begins[name], cut) for name, cut in cuts.items()}
        made = partition(replace(made, holders=holders), f"partition_axis_{axis}") if holders else made
    return _as_slices(made, step.holders, begins)


def _partitioning_along(axis: int, holder: Holder) -> Partitioning | None:
    """Returns the lengths of the slices of a variable along an axis; None if they do not differ along it."""
    if axis >= len(holder.shape):
        return None
    starts = sorted({one.begin[axis] for one in holder.slices})
    sizes = tuple(end - start for start, end in pairwise([*starts, holder.shape[axis]]))
    return Partitioning(axis, sizes) if len(sizes) > 1 else None


def _begins_of_shards(begins: _Begins, cut: Partitioning) -> _Begins:
    return {
        shard_name(suffix, k): (*begin[: cut.axis], start, *begin[cut.axis + 1 :])
        for suffix, begin in begins.items()
        for k, start in enumerate(cut.starts)
    }


def _as_slices(step: PlacedStep, holders: Mapping[str, Holder], begins: Mapping[str, _Begins]) -> PlacedStep:
    """Returns a step whose shards are slices of the holders; these get the names of the shards in the step."""
    editor, made = StepEditor(step), dict(holders)
    for name, shards in begins.items():
        slice_at = {one.begin: one for one in holders[name].slices}
        for suffix, begin in shards.items():
            stored = editor[step.by_name[name + suffix].handle].attr["shared_name"]
            stored.s = stored.s.removesuffix(suffix.encode()) + slice_at[begin].name.encode()
        slices = tuple(replace(slice_at[begin], name=suffix) for suffix, begin in shards.items())
        made[name] = replace(holders[name], slices=slices)
    return editor.to_step(holders=made)
