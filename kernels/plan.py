"""Plan: what a strategy says, resolved once."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from functools import cached_property

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.graph.pipeline_schedule import SCHEDULES
from autodist.graph.placement import SyncMode, VariablePlacement
from autodist.proto import strategy_pb2
from autodist.synchronizers import COLLECTIVES, HIERARCHICAL, AllReduce, cut_of, named_synchronizers


class Plan:
    """Answers about a strategy, by variable or shard and by join; kernels read it and no message.

    Args:
        strategy: checked and without AUTO.

    Attributes:
        cuts: of the variables that are cut.
        seats: for each pipeline stage its workers, one of each pipeline; none where every replica computes all of the
            model.
        schedule: the order in which a pipeline takes up the micro-batches.
        recomputes: whether a pipeline stage goes forward anew before it goes back.
    """

    def __init__(self, strategy: strategy_pb2.Strategy) -> None:
        self._pieces = {node.variable: dict(named_synchronizers(node)) for node in strategy.nodes}
        self._said = {name: said for pieces in self._pieces.values() for name, said in pieces.items()}
        found = {node.variable: cut_of(node) for node in strategy.nodes}
        self.cuts = {variable: cut for variable, cut in found.items() if cut is not None}
        self.seats = tuple((one.worker, *(b.worker for b in one.beside)) for one in strategy.pipeline.stages)
        self.schedule = SCHEDULES[strategy.pipeline.schedule]
        self.recomputes = strategy.pipeline.recompute

    @property
    def stages(self) -> tuple[int, ...]:
        """The worker of each pipeline stage; where there are several, the first, which stands for them as an owner."""
        return tuple(workers[0] for workers in self.seats)

    @property
    def pipelines(self) -> int:
        """How many pipelines stand side by side, each over its part of the batch."""
        return len(self.seats[0]) if self.seats else 1

    @cached_property
    def stage_group(self) -> dict[int, tuple[int, ...]]:
        """For each owner the other workers of its pipeline stage, which hold the same variables."""
        return {workers[0]: workers[1:] for workers in self.seats if len(workers) > 1}

    @property
    def variables(self) -> Collection[str]:
        """The names of all variables that are synchronised, in the strategy's order."""
        return self._pieces.keys()

    def owners_of(self, variable: str) -> dict[str, int]:
        """The owner of a variable, or of each of its shards, where one worker alone holds it."""
        return {name: said.owner for name, said in self._pieces[variable].items() if said.owner is not None}

    @cached_property
    def collective(self) -> str | None:
        """The collective that all variables use, if there is one: then nothing may travel in another way beside it."""
        return next((said.way for said in self._said.values() if said.way in COLLECTIVES), None)

    def owner(self, variable: str) -> int | None:
        """The worker that owns a variable, None if every worker has it."""
        return self._said[variable].owner if variable in self._said else None

    def variable_placement(self, variable: str) -> VariablePlacement | None:
        """How a variable is kept that one worker owns."""
        return self._said[variable].variable_placement if variable in self._said else None

    def has_proxy(self, variable: str) -> bool:
        """Whether every worker keeps a copy of an owned variable that its replicas read."""
        return variable in self._said and self._said[variable].has_proxy

    @property
    def is_asynchronous(self) -> bool:
        """Whether every variable that has a gradient is updated by each worker's gradient alone."""
        variable_placements = [said.variable_placement for said in self._said.values()]
        return bool(variable_placements) and all(
            k is not None and k.pace is SyncMode.ASYNCHRONOUS for k in variable_placements
        )

    def owner_of(self, join: PendingReduction) -> int | None:
        return self.owner(join.variable) if join.kind is PendingReductionKind.GRADIENT and join.variable else None

    def travels_by_shuffle(self, join: PendingReduction) -> bool:
        return self.collective is None and self.owner_of(join) is None

    def in_teams(self, join: PendingReduction) -> bool:
        """Whether a join is added up within teams first, where there are teams; a join for no variable always is."""
        said = self._said.get(join.variable) if join.kind is PendingReductionKind.GRADIENT and join.variable else None
        return not isinstance(said, AllReduce) or said.way == HIERARCHICAL

    def group(self, join: PendingReduction) -> Hashable:
        """Joins of one group may share a bucket."""
        return None if join.variable is None else self._said[join.variable].group

    def compressor(self, join: PendingReduction) -> Compressor:
        """What makes a gradient smaller before it travels, if anything is to."""
        said = self._said.get(join.variable) if join.kind is PendingReductionKind.GRADIENT and join.variable else None
        return said.compressor if isinstance(said, AllReduce) else NO_COMPRESSOR
