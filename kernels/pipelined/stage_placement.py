"""Stage placement: the pipeline stage, and the pipeline among several, that runs each node of a replicated step."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from autodist.graph.effects import PASSES
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.op_types import RESOURCE, is_stateless, types_of_outputs
from autodist.graph.ops import Trait, having
from autodist.graph.pipeline_schedule import Unit
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, ReplicatedStep
from autodist.graph.walks import reach
from autodist.kernels.context import Context
from autodist.kernels.pipelined.assign_stages import stage_of_handles
from autodist.logs.formatting import listed
from autodist.options.fields import OptionError

_TABLES = having(Trait.TABLE_READ | Trait.CALL)


class UnstagedPlacement(enum.Enum):
    """Placements of nodes that belong to no single pipeline stage."""

    READ = "each stage that reads it makes it for itself"
    ALL = "every stage runs it"


@dataclass(frozen=True)
class StageRank:
    """A pipeline stage of one of the parallel pipelines, or of each of them.

    Attributes:
        stage: index of the stage.
        pipeline: index of the pipeline; None for each of them.
    """

    stage: int
    pipeline: int | None


Home = StageRank | UnstagedPlacement

FED = StageRank(0, 0)
"""The placement of fed tensors: the chief."""


@dataclass(frozen=True)
class StageTransfer:
    """A tensor that one worker computes and another reads."""

    name: str
    source: int
    reader: int


class StagePlacement:
    """The placement of a step's nodes on workers.

    A node runs on one pipeline stage; or on every stage, if it writes a variable that each of them copies; or on each
    stage that reads it, if it depends on nothing that a single stage has. If there are several pipelines, the one whose
    micro-batch the node is for runs it. Nodes for the micro-batches of several pipelines, such as updates, run on each
    of them.

    Args:
        step: the step, replicated as that of one worker.
        context: the worker for which it is rewritten.

    Attributes:
        home: the placement of each node.
        micro_batches: the number of micro-batches of each pipeline.
    """

    def __init__(self, step: ReplicatedStep, context: Context) -> None:
        self.step, self.context, self.graph_index = step, context, step.graph_index
        self.stages = context.placement.stages
        self.pipelines = self.stages.pipelines
        self.micro_batches = len(context.replicas) // self.pipelines
        self.stage_of = stage_of_handles(step, context)
        self.home: dict[str, Home] = {}
        self._find()

    def unit_of(self, name: str) -> Unit | None:
        """Returns the unit in which a node is computed; None if it belongs to none."""
        if self.step.copies and name not in self.step.copies:  # empty if there is one micro-batch
            return None
        micro_batch, captured = self.step.replica_of(name)
        part = self.step.pipeline_parts.get(captured)
        home = self.home[name]
        if part is None or part.is_held or isinstance(home, UnstagedPlacement) or home.stage != part.stage:
            return None
        return Unit(part.stage, micro_batch, part.is_backward)

    def _find(self) -> None:
        open_nodes: list[str] = []
        """Nodes that depend only on a batch or on random numbers; they are computed where they are first read."""
        floating: set[str] = set()
        for name in self.graph_index.order:
            home = self._own_home(name)
            if home is None:
                placed_inputs = [h for s in self.graph_index.data[name] if isinstance(h := self.home.get(s), StageRank)]
                if placed_inputs:
                    home = StageRank(max(h.stage for h in placed_inputs), self._pipeline_of(name, placed_inputs))
                elif not floating.isdisjoint(self.graph_index.data[name]) or self._is_unique(name):
                    open_nodes.append(name)
                    floating.add(name)
                    continue
                else:
                    home = UnstagedPlacement.READ
            self.home[name] = home
            if name in self._fed:
                del self.home[name]
                floating.add(name)
        self.home.update(dict.fromkeys((n for n in self._fed if n in self.graph_index.nodes), FED))
        for name in reversed(open_nodes):
            self.home[name] = self._where_read(name)

    def _pipeline_of(self, name: str, inputs: Iterable[StageRank]) -> int | None:
        """Returns the pipeline that runs a node with inputs placed at `inputs`; None if each pipeline does."""
        own = self._own_pipeline(name)
        if own is not None:
            return own
        found = {seat.pipeline for seat in inputs} - {None}
        if len(found) == 1:
            return found.pop()
        return FED.pipeline if self._is_unique(name) else None

    def _own_pipeline(self, name: str) -> int | None:
        """Returns the pipeline of the micro-batch that a node is for; None if it is for all."""
        copies = self.step.copies
        return copies[name][0] // self.micro_batches if name in copies else None

    def _where_read(self, name: str) -> StageRank:
        """Returns the placement of a node that runs where it is first read, so that only parts of a batch are sent."""
        own = self._own_pipeline(name)
        if own is None and self.pipelines > 1 and not self._fed.isdisjoint(self.graph_index.data[name]):
            return FED
        readers = (self.home.get(reader) for reader in self.graph_index.readers(name))
        seats = [home for home in readers if isinstance(home, StageRank)]
        if not seats:
            return FED
        if own is None:
            found = {seat.pipeline for seat in seats}
            own = found.pop() if len(found) == 1 else None
        return StageRank(min(seat.stage for seat in seats), FED.pipeline if own is None else own)

    @cached_property
    def _fed(self) -> frozenset[str]:
        return frozenset(map(node_of, (*self.step.batch_axes, EXAMPLES, ALL_EXAMPLES)))

    def _own_home(self, name: str) -> Home | None:
        """Returns the placement of a node that does not depend on its inputs' placements, or None."""
        if name in self._fed:
            return FED
        effect = self.graph_index.effects.get(name)
        if effect is not None:
            owned = {self.stage_of[h] for h in effect.reads | effect.writes if h in self.stage_of}
            if len(owned) > 1:
                raise self._of_several(name)
            if owned:
                self._require_own_writes(name)
                return StageRank(owned.pop(), self._own_pipeline(name))
            if effect.writes:
                return UnstagedPlacement.ALL
        copies = self.step.copies
        if not copies or name in copies or name in self.step.pipeline_parts:
            part = self.step.pipeline_parts.get(self.step.replica_of(name)[1])
            return None if part is None else StageRank(part.stage, self._own_pipeline(name))
        return None

    def _of_several(self, name: str) -> OptionError:
        effect = self.graph_index.effects[name]
        used = sorted(self.step.by_handle[h].name for h in effect.reads | effect.writes if h in self.stage_of)
        return OptionError(
            "stages",
            f"{name} ({self.graph_index.nodes[name].op}) uses {listed(used)}, which are in different pipeline stages, "
            "and an operation is not split. Put these variables into one stage.",
        )

    def _require_own_writes(self, name: str) -> None:
        """Checks that an operation that uses variables of a stage writes no variable that every worker holds."""
        effect = self.graph_index.effects[name]
        shared = sorted(self.step.by_handle[h].name for h in effect.writes if h not in self.stage_of)
        owned = sorted(self.step.by_handle[h].name for h in effect.reads | effect.writes if h in self.stage_of)
        if shared:
            raise OptionError(
                "stages",
                f"{name} ({self.graph_index.nodes[name].op}) writes {listed(shared)}, which every worker holds, and "
                f"uses {listed(owned)}, which a pipeline stage holds: the other workers would not see the new value. "
                "Write them by separate operations.",
            )

    def _is_unique(self, name: str) -> bool:
        """Returns True if a node that depends on no stage may have a different value on every worker that runs it."""
        node = self.graph_index.nodes[name]
        if node.op in _TABLES or node.op in PASSES or name in self.graph_index.effects or is_stateless(node.op):
            return False
        try:
            return RESOURCE not in types_of_outputs(node)
        except AttributeError:  # a function of the graph's, called as an op
            return True

    # -- placement of nodes on workers -----------------------------------------------------------------------------

    @cached_property
    def needed(self) -> frozenset[str]:
        """The nodes that the step's outputs and targets depend on."""
        roots = [*map(node_of, self.step.outputs), *self.step.targets]
        return frozenset(reach(roots, self.graph_index.sources.__getitem__))

    @cached_property
    def runs_at(self) -> dict[str, frozenset[int]]:
        """The workers that run each needed node."""
        everywhere = frozenset(self.context.group.everyone)
        roots = {*map(node_of, self.step.outputs), *self.step.targets}
        found: dict[str, frozenset[int]] = {}
        for name in reversed(self.graph_index.order):
            if name not in self.needed:
                continue
            home = self.home[name]
            if isinstance(home, StageRank):
                workers = self.stages.groups[home.stage].workers
                found[name] = frozenset(workers if home.pipeline is None else (workers[home.pipeline],))
            elif home is UnstagedPlacement.ALL or name in roots:
                found[name] = everywhere
            else:
                readers = self.graph_index.consumers[name]
                found[name] = frozenset().union(*(found[c] for c in readers if c in found))
        return found

    def crossings(self) -> Iterator[StageTransfer]:
        """Yields the tensors to transfer, each to each of its readers once, in the order in which they are computed."""
        transfers: dict[str, dict[StageTransfer, None]] = {}
        for name in self.needed:
            for i in self.graph_index.nodes[name].input:
                if not is_control(i):
                    self._add_transfers(transfers, tensor(i), self.runs_at[name])
        for name in self.step.outputs:
            self._add_transfers(transfers, tensor(name), self.context.group.everyone)
        for name in self.graph_index.order:
            yield from sorted(transfers.get(name, ()), key=lambda crossing: (crossing.name, crossing.reader))

    def _add_transfers(
        self, transfers: dict[str, dict[StageTransfer, None]], name: str, readers: Iterable[int]
    ) -> None:
        """Adds a tensor's transfers to its readers; a tensor of every pipeline comes from the reader's own pipeline."""
        home = self.home[node_of(name)]
        if isinstance(home, UnstagedPlacement):
            return
        for reader in readers:
            pipeline = self.stages.rank_of(reader)[1] if home.pipeline is None else home.pipeline
            source = self.stages.groups[home.stage].workers[pipeline]
            if source != reader:
                transfers.setdefault(node_of(name), {})[StageTransfer(name, source, reader)] = None
