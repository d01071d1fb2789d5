"""Plan: a strategy, resolved per variable."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from functools import cached_property

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.graph.parts import PendingReduction, PendingReductionKind, Variable
from autodist.graph.pipeline_schedule import SCHEDULES
from autodist.placement.group import Group, worker_count
from autodist.placement.holder import Holder
from autodist.placement.synchrony import Synchrony, SyncMode
from autodist.proto import strategy_pb2
from autodist.synchronizers import COLLECTIVES, HIERARCHICAL, AllReduce, named_synchronizers, partitioning_of


class Plan:
    """Answers queries about a strategy by variable, shard and pending reduction. Kernels read it, not the proto.

    Args:
        strategy: validated and without AUTO.

    Attributes:
        partitionings: those of the partitioned variables.
        stage_workers: for each pipeline stage its workers, one per pipeline; empty if every replica computes the whole
            model.
        schedule: the order in which a pipeline processes the micro-batches.
        recomputes: True if a pipeline stage recomputes its forward pass before the backward pass.
    """

    def __init__(self, strategy: strategy_pb2.Strategy) -> None:
        self._shards = {node.variable: dict(named_synchronizers(node)) for node in strategy.nodes}
        self._synchronizers = {name: one for shards in self._shards.values() for name, one in shards.items()}
        partitionings = {node.variable: partitioning_of(node) for node in strategy.nodes}
        self.partitionings = {variable: one for variable, one in partitionings.items() if one is not None}
        self.stage_workers = tuple(
            (one.worker, *(b.worker for b in one.stage_group)) for one in strategy.pipeline.stages
        )
        self.schedule = SCHEDULES[strategy.pipeline.schedule]
        self.recomputes = strategy.pipeline.recompute
        self._workers = worker_count(strategy.graph_config)
        self._groups: dict[int | None, Group] = {}

    @property
    def stages(self) -> tuple[int, ...]:
        """The worker of each pipeline stage; with several pipelines, the first one, which counts as the owner."""
        return tuple(workers[0] for workers in self.stage_workers)

    @property
    def pipelines(self) -> int:
        """The number of parallel pipelines. Each processes its part of the batch."""
        return len(self.stage_workers[0]) if self.stage_workers else 1

    @property
    def variables(self) -> Collection[str]:
        """The names of all synchronised variables, in the strategy's order."""
        return self._shards.keys()

    def holder(self, variable: Variable) -> Holder:
        """Returns the holder of a synchronised variable."""
        groups = [self._group_of(one.owner) for one in self._shards[variable.name].values()]
        partitioning = self.partitionings.get(variable.name)
        if partitioning is None:
            return Holder.whole(variable.shape, groups[0])
        return Holder.partitioned(variable.shape, partitioning, groups)

    @property
    def all_workers(self) -> Group:
        return Group.all_workers(self._workers)

    def _group_of(self, owner: int | None) -> Group:
        """Returns all workers without an owner, or the owner with the other workers of its pipeline stage."""
        if owner not in self._groups:
            stage = next((workers for workers in self.stage_workers if workers[0] == owner), None)
            self._groups[owner] = self.all_workers if owner is None else Group.of_workers(stage or (owner,))
        return self._groups[owner]

    @property
    def first_owner(self) -> int:
        """The owner of the first variable, or of its first shard; there is one if all variables are asynchronous."""
        owner = next(iter(self._synchronizers.values())).owner
        assert owner is not None, "an asynchronous variable has an owner"
        return owner

    @cached_property
    def collective(self) -> str | None:
        """The collective that all variables use, if any. No other transport may then be used at the same time."""
        return next((one.way for one in self._synchronizers.values() if one.way in COLLECTIVES), None)

    def owner(self, variable: str) -> int | None:
        """Returns the worker that owns a variable, or None if every worker has it."""
        return self._synchronizers[variable].owner if variable in self._synchronizers else None

    def synchrony(self, variable: str) -> Synchrony | None:
        """Returns the synchronization of a variable that one worker owns."""
        return self._synchronizers[variable].synchrony if variable in self._synchronizers else None

    def has_cached_copy(self, variable: str) -> bool:
        """Returns True if every worker caches a copy of an owned variable for its replicas to read."""
        return variable in self._synchronizers and self._synchronizers[variable].has_cached_copy

    @property
    def is_asynchronous(self) -> bool:
        """True if every trained variable is updated with each worker's gradient separately."""
        synchronies = [one.synchrony for one in self._synchronizers.values()]
        return bool(synchronies) and all(k is not None and k.mode is SyncMode.ASYNCHRONOUS for k in synchronies)

    def owner_of(self, pending: PendingReduction) -> int | None:
        return (
            self.owner(pending.variable) if pending.kind is PendingReductionKind.GRADIENT and pending.variable else None
        )

    def uses_shuffle(self, pending: PendingReduction) -> bool:
        return self.collective is None and self.owner_of(pending) is None

    def uses_subgroups(self, pending: PendingReduction) -> bool:
        """Returns True if a value is reduced within subgroups first, if there are any; True without a variable."""
        variable = pending.variable if pending.kind is PendingReductionKind.GRADIENT else None
        synchronizer = self._synchronizers.get(variable) if variable else None
        return not isinstance(synchronizer, AllReduce) or synchronizer.way == HIERARCHICAL

    def fusion_group(self, pending: PendingReduction) -> Hashable:
        """Returns the fusion group that the strategy sets for a pending reduction; only its members share buckets."""
        return None if pending.variable is None else self._synchronizers[pending.variable].group

    def compressor(self, pending: PendingReduction) -> Compressor:
        """Returns the compressor that is applied to a gradient before it is sent, if any."""
        variable = pending.variable if pending.kind is PendingReductionKind.GRADIENT else None
        synchronizer = self._synchronizers.get(variable) if variable else None
        return synchronizer.compressor if isinstance(synchronizer, AllReduce) else NO_COMPRESSOR
