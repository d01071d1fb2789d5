"""Place stages: each worker of a pipeline runs its own part of the step, and hands on what the others need."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import FetchedElsewhereError
from autodist.graph.control_flow import find_inside
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.op_types import RESOURCE, VARIANT, type_of
from autodist.graph.pipeline_schedule import Unit
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.waiting import wait_past
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.pipelined.execution_order import find_order, nodes_of_units, take_turns
from autodist.kernels.pipelined.recompute import recompute
from autodist.kernels.pipelined.stage_placement import StagePlacement, StageRank, StageTransfer
from autodist.options.fields import OptionError


@dataclass(frozen=True)
class PlaceStages(Kernel):
    """Deals out a step that is replicated as that of one worker: its micro-batches are the replicas.

    A worker keeps what its pipeline stage computes and what updates its variables. Tensors that another one reads are
    sent through queues as soon as they are there, those of a micro-batch by themselves, so that the stages work at
    different ones side by side; in which order a worker takes these up, the schedule says. As no arithmetic is changed,
    the result is, bit for bit, that of as many replicas on one worker.

    A step ends on every worker once all have updated their variables, so that what is read between two steps is new.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019.
    """

    name: ClassVar[str] = "place-stages"

    def apply(self, item: Step, context: Context) -> Step:
        if not context.goes_through_stages(item):
            return item
        homes = StagePlacement(item, context)
        _require_fetched_by_all(homes, context)
        order, sent = find_order(homes, context), parcels(homes)
        mine = {name for name, workers in homes.runs_at.items() if context.worker in workers}
        editor = StepEditor(item)
        nodes = nodes_of_units(homes, order[context.worker])
        turns = take_turns(editor, homes, nodes)
        Post(editor, homes, context).exchange(sent)
        anew = recompute(editor, homes.graph_index, nodes, turns) if context.plan.recomputes else {}
        _hand_out_tokens(editor, homes, context)
        editor.drop_targets([name for name in editor.targets if name in homes.runs_at and name not in mine])
        made = set(editor.names) - item.graph_index.nodes.keys()
        wait_past(editor, mine | made)
        return _for_their_micro_batches(editor.to_item(), anew)


def _for_their_micro_batches(item: Step, originals: Mapping[str, str]) -> Step:
    """The step in which a copy is known to be for the micro-batch that its original is for."""
    replication = item.replication
    if replication is None or not originals:
        return item
    made = {copy: item.replica_of(name) for copy, name in originals.items()}
    anew = {copy: replace(item.pipeline_parts[own], is_anew=True) for copy, (_, own) in made.items()}
    return replace(
        item,
        replication=replace(replication, copies={**replication.copies, **made}),
        pipeline_parts={**item.pipeline_parts, **anew},
    )


def _require_fetched_by_all(homes: StagePlacement, context: Context) -> None:
    """Passes if nothing that one pipeline stage has is fetched where workers may fetch different things."""
    if context.joins_outputs:
        return
    for name in homes.item.outputs:
        if isinstance(homes.home[node_of(name)], StageRank):
            raise FetchedElsewhereError(
                f"{name} is computed by the stages of a pipeline, one after the other, and not all workers fetch it in "
                "this run. Fetch it on every worker alike, and not under `if ad.is_chief`."
            )


def _hand_out_tokens(editor: StepEditor, homes: StagePlacement, context: Context) -> None:
    """Each worker tells the others that its variables are written."""
    writes: dict[int, list[str]] = {}
    for name, effect in homes.graph_index.effects.items():
        stages = {homes.stage_of[h] for h in effect.writes if h in homes.stage_of}
        if name in homes.needed and stages:
            writes.setdefault(stages.pop(), []).append(name)
    for stage, names in sorted(writes.items()):
        for writer in context.plan.seats[stage]:
            _hand_out_token(editor, names, context, writer)


def _hand_out_token(editor: StepEditor, names: Sequence[str], context: Context, writer: int) -> None:
    """A worker tells those that may read or set its variables once `names` have written them."""
    readers = [reader for reader in range(context.workers) if _touches(context, reader, writer)]
    if context.worker not in (writer, *readers):
        return
    with subgraph(editor, f"pipeline/token/{writer}") as f, tf.device(context.cpu(context.worker)):
        exchange = Communicator(f, context, f"pipeline/token/{writer}")
        done = tf.constant(True)
        if writer == context.worker:
            for reader in readers:
                exchange.send(reader, "done", [done], [f.after(names)])
        else:
            exchange.receive(writer, "done", [done])
    editor.run(exchange.effects)


def _touches(context: Context, reader: int, writer: int) -> bool:
    """Whether a worker reads or sets between steps what another one holds.

    The chief sets what all hold; of those who hold the same, all read at the first, and a step at that of its pipeline.
    """
    if reader == writer:
        return False
    pipelines = [next(w.index(one) for w in context.plan.seats if one in w) for one in (reader, writer)]
    return reader == 0 or pipelines[1] in (0, pipelines[0])


@dataclass(frozen=True)
class StageMessage:
    """Tensors that one worker sends to another once all of them are there.

    What is sent together must not wait for one another by way of other workers. Tensors of one unit do not, if units
    can be put into an order at all, and have one round; nor do those of one round that no unit waits for. Whatever else
    there is travels by itself.

    Attributes:
        source: the worker that makes them.
        reader: the one that reads them.
        round: for how many crossings, one after the other, they wait.
        of: the unit that makes them; None: no unit waits for them; a tensor's name: it travels by itself.
    """

    source: int
    reader: int
    round: int
    of: Unit | str | None

    @property
    def key(self) -> str:
        """Tells it from the other parcels of a step; the same on all workers."""
        of = f"{self.of.stage}/{self.of}" if isinstance(self.of, Unit) else self.of
        return f"{self.source}/{self.reader}/{self.round}/{of}"


def parcels(homes: StagePlacement) -> dict[StageMessage, list[str]]:
    """All that travels, in the same order on all workers."""
    crossings = list(homes.crossings())
    _require_values(homes, crossings)
    rounds = _rounds(homes.item, {c.name for c in crossings})
    leading = _leading_to_units(homes)
    found: dict[StageMessage, list[str]] = {}
    for crossing in crossings:
        node = node_of(crossing.name)
        alone = crossing.name if node in leading else None
        parcel = StageMessage(crossing.source, crossing.reader, rounds[node], homes.unit_of(node) or alone)
        found.setdefault(parcel, []).append(crossing.name)
    return found


def _require_values(homes: StagePlacement, crossings: Sequence[StageTransfer]) -> None:
    """Passes if all that travels has a value in each step that can be sent.

    Raises:
        StrategyError: names the tensor, and what stands on either side.
    """
    inside = set(find_inside(homes.graph_index))
    for crossing in crossings:
        kind = type_of(homes.graph_index, crossing.name)
        node = homes.graph_index.nodes[node_of(crossing.name)]
        if node.name in inside:
            why = "stands in a loop or a branch, which is not cut"
        elif kind in (RESOURCE, VARIANT):
            why = "is a list of tensors or a resource, which cannot be sent"
        else:
            continue
        name = homes.item.replica_of(node.name)[1]
        source, reader = map(homes.stage_of_worker, (crossing.source, crossing.reader))
        raise OptionError(
            "stages",
            f"{name} ({node.op}) is made by pipeline stage {source} and read by stage {reader}, and {why}. Put the "
            "variables of what reads it and of what makes it into one stage.",
        )


def _rounds(item: Step, travelling: Collection[str]) -> Mapping[str, int]:
    """For each node, how many crossings it waits for, one after the other."""
    rounds: dict[str, int] = {}
    for name in item.graph_index.order:
        inputs = item.graph_index.nodes[name].input
        after = [rounds.get(node_of(i), 0) + (not is_control(i) and tensor(i) in travelling) for i in inputs]
        rounds[name] = max(after, default=0)
    return rounds


def _leading_to_units(homes: StagePlacement) -> set[str]:
    """The nodes that some unit waits for."""
    units = (name for name in homes.needed if homes.unit_of(name) is not None)
    return reach(units, homes.graph_index.sources.__getitem__)


class Post:
    """Sends and receives one worker's parcels.

    Args:
        editor: of the step.
        homes: who runs what.
        context: for whom.

    Attributes:
        received: for each tensor that comes, what stands for it here.
    """

    def __init__(self, editor: StepEditor, homes: StagePlacement, context: Context) -> None:
        self.editor, self.homes, self.context = editor, homes, context
        self.me = context.worker
        self.received: dict[str, str] = {}

    def exchange(self, sent: Mapping[StageMessage, list[str]]) -> None:
        """Adds what this worker sends and receives; its readers read what it receives."""
        made: list[str] = []
        for parcel, names in sent.items():
            if self.me in (parcel.source, parcel.reader):
                made += self._exchange(parcel, names)
        for name, here in self.received.items():
            readers = [c for c in self.editor.consumers(node_of(name)) if self._is_mine(c)]
            self.editor.rewire(name, here, readers)
            self.editor.replace_output(name, here)
        self.editor.run(made)

    def _is_mine(self, name: str) -> bool:
        return self.me in self.homes.runs_at.get(name, ())

    def _exchange(self, parcel: StageMessage, names: list[str]) -> list[str]:
        specs = [self._spec(name) for name in names]
        # Programs of one run share queues by name: those of other tensors are other queues.
        told = [f"{name} {spec.dtype.name} {spec.shape}" for name, spec in zip(names, specs, strict=True)]
        place = digest(f"{parcel.key};{';'.join(told)}")
        with subgraph(self.editor, f"pipeline/{place}") as f, tf.device(self.context.cpu(self.context.worker)):
            exchange = Communicator(f, self.context, f"pipeline/{place}")
            if self.me == parcel.source:
                values = f.inputs_like(names, specs)
                exchange.send(parcel.reader, "needed", values)
                got = []
            else:
                got = exchange.receive(parcel.source, "needed", specs)
        self.received.update({name: f.name(value) for name, value in zip(names, got, strict=False)})
        return exchange.effects

    def _spec(self, name: str) -> tf.TensorSpec:
        """A tensor's type, and its shape as far as the captured step tells: micro-batches are parts of its batch."""
        item = self.homes.item
        kind = tf.as_dtype(type_of(item.graph_index, name))
        captured = item.replica_of(node_of(name))[1]
        known = item.spec_of(f"{captured}:{output_index(name)}")
        return tf.TensorSpec(known.shape if known.dtype == kind else None, kind)
