"""Placement: the groups that hold the values of a run, resolved once from its strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.placement.partitioning import Partitioning


@dataclass(frozen=True)
class PipelineStages:
    """The groups that compute the stages of a pipeline and hold their variables.

    Attributes:
        groups: for each stage its workers, one per pipeline; empty if every replica computes the whole model. The first
            worker counts as the owner of the variables.
    """

    groups: tuple[Group, ...] = ()

    @property
    def pipelines(self) -> int:
        """The number of parallel pipelines. Each processes its part of the batch."""
        return len(self.groups[0].workers) if self.groups else 1

    def group_of(self, owner: int) -> Group:
        """Returns the group that holds the variables of an owner; the owner alone if there are no stages."""
        return self._groups.get(owner) or Group.of_workers([owner])

    def rank_of(self, worker: int) -> tuple[int, int]:
        """Returns a worker's pipeline stage, and its data-parallel rank among the workers of that stage."""
        return self._ranks[worker]

    def stage_of(self, worker: int) -> int:
        """Returns the pipeline stage of a worker, or of the variables that it owns."""
        return self._ranks[worker][0]

    @cached_property
    def _groups(self) -> dict[int, Group]:
        return {group.workers[0]: group for group in self.groups}

    @cached_property
    def _ranks(self) -> dict[int, tuple[int, int]]:
        return {
            worker: (stage, rank)
            for stage, group in enumerate(self.groups) for rank, worker in enumerate(group.workers)
        }  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """The groups that hold the slices of the synchronised variables and compute the stages of a pipeline.

    Attributes:
        all_workers: the group of all workers, with or without replicas.
        stages: of the pipeline, if there is one.
        owners: for each synchronised variable, in the strategy's order, the owner of each of its slices; None: every
            worker holds the slice.
        partitionings: those of the partitioned variables.
        layers: the layer with which each variable is gathered, if it is (`Holder.layer`).
    """

    all_workers: Group
    stages: PipelineStages
    owners: Mapping[str, Sequence[int | None]]
    partitionings: Mapping[str, Partitioning]
    layers: Mapping[str, int] = field(default_factory=dict)

    def holder(self, variable: str, shape: Sequence[int]) -> Holder:
        """Returns the holder of a synchronised variable."""
        owners = self.owners[variable]
        groups = [self.all_workers if owner is None else self.stages.group_of(owner) for owner in owners]
        partitioning = self.partitionings.get(variable)
        if partitioning is None:
            holder = Holder.whole(shape, groups[0])
        else:
            holder = Holder.partitioned(shape, partitioning, groups)
        return replace(holder, layer=self.layers.get(variable, 0))
