"""PlaceStages: each worker keeps its pipeline stage of the step and sends the tensors that other workers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import FetchedElsewhereError
from autodist.graph.control_flow import find_inside
from autodist.graph.execution_order import count_rounds
from autodist.graph.names import node_of, output_index
from autodist.graph.op_types import RESOURCE, VARIANT, type_of
from autodist.graph.pipeline_schedule import Unit
from autodist.graph.step import ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.waiting import redirect_control_inputs
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.pipelined.execution_order import enforce_order, find_order, nodes_of_units
from autodist.kernels.pipelined.recompute import recompute_units
from autodist.kernels.pipelined.stage_placement import StagePlacement, StageRank, StageTransfer
from autodist.options.fields import OptionError
from autodist.placement.group import Group


@dataclass(frozen=True)
class PlaceStages(Kernel[ReplicatedStep, ReplicatedStep]):
    """Distributes a replicated step over the workers of a pipeline; the micro-batches are the replicas.

    A worker keeps the nodes of its pipeline stage and the updates of its variables. Tensors that another worker reads
    are sent through queues as soon as they are computed, separately for each micro-batch. Stages therefore process
    different micro-batches in parallel. The schedule determines a worker's execution order. As no arithmetic changes,
    the result is bit for bit that of as many replicas on one worker.

    A step ends on every worker after all workers have updated their variables, so that reads between two steps see the
    new values.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019.
    """

    name: ClassVar[str] = "place-stages"

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if not context.goes_through_stages(step):
            return step
        placement = StagePlacement(step, context)
        _require_fetched_by_all(placement, context)
        order, sent = find_order(placement, context), parcels(placement)
        mine = {name for name, workers in placement.runs_at.items() if context.worker in workers}
        editor = StepEditor(step)
        nodes = nodes_of_units(placement, order[context.worker])
        starts = enforce_order(editor, placement, nodes)
        StageExchange(editor, placement, context).exchange(sent)
        blocks = context.plan.recomputed_blocks
        recomputed = recompute_units(editor, step, nodes, starts, blocks) if context.plan.recomputes else {}
        _exchange_completion_signals(editor, placement, context)
        editor.drop_targets([name for name in editor.targets if name in placement.runs_at and name not in mine])
        made = set(editor.names) - step.graph_index.nodes.keys()
        redirect_control_inputs(editor, mine | made)
        return _with_micro_batches(editor.to_step(), recomputed)


def _with_micro_batches(step: ReplicatedStep, originals: Mapping[str, str]) -> ReplicatedStep:
    """Returns the step in which recomputed copies belong to the micro-batches of their originals."""
    if not originals:
        return step
    made = {copy: step.replica_of(name) for copy, name in originals.items()}
    recomputed = {copy: step.pipeline_parts[own] for copy, (_, own) in made.items()}
    return replace(
        step,
        copies={**step.copies, **made},
        pipeline_parts={**step.pipeline_parts, **recomputed},
    )


def _require_fetched_by_all(placement: StagePlacement, context: Context) -> None:
    """Raises an error if workers may fetch different outputs, and one is computed by a single pipeline stage."""
    if context.reduces_outputs:
        return
    for name in placement.step.outputs:
        if isinstance(placement.home[node_of(name)], StageRank):
            raise FetchedElsewhereError(
                f"{name} is computed by the stages of a pipeline, and not all workers fetch it in this run. Fetch it "
                "on every worker, not only under `if ad.is_chief`."
            )


def _exchange_completion_signals(editor: StepEditor[Step], placement: StagePlacement, context: Context) -> None:
    """Makes each worker send the others a completion signal when its variables are written."""
    if context.mesh is not None:  # SignalParts sends signals between the workers of all rows
        return
    writes: dict[int, list[str]] = {}
    for name, effect in placement.graph_index.effects.items():
        stages = {placement.stage_of[h] for h in effect.writes if h in placement.stage_of}
        if name in placement.needed and stages:
            writes.setdefault(stages.pop(), []).append(name)
    for stage, names in sorted(writes.items()):
        for writer in context.placement.stages.groups[stage].workers:
            _exchange_completion_signal(editor, names, context, writer)


def _exchange_completion_signal(editor: StepEditor[Step], names: Sequence[str], context: Context, writer: int) -> None:
    """Sends a completion signal after the writes `names` to workers that may access the variables of `writer`."""
    readers = [reader for reader in sorted(context.group.everyone) if _accesses(context, reader, writer)]
    if context.worker not in (writer, *readers):
        return
    with subgraph(editor, f"pipeline/completion_signal/{writer}") as f, tf.device(context.cpu(context.worker)):
        exchange = Communicator(f, context, f"pipeline/completion_signal/{writer}", Group.of_workers([writer], readers))
        done = tf.constant(True)
        if writer == context.worker:
            exchange.broadcast("done", [done], after=names)
        else:
            exchange.receive(writer, "done", [done])
    editor.run(exchange.effects)


def _accesses(context: Context, reader: int, writer: int) -> bool:
    """Returns True if a worker reads or sets another worker's variables between steps.

    The chief sets the variables of all workers. Between steps, every worker reads a stage's variables from the first
    worker of that stage; a step reads them from its own pipeline.
    """
    if reader == writer:
        return False
    stages = context.placement.stages
    return reader == 0 or stages.rank_of(writer)[1] in (0, stages.rank_of(reader)[1])


@dataclass(frozen=True)
class StageMessage:
    """Tensors that one worker sends to another in one message, once all of them are computed.

    No tensor of a message may depend on the arrival of another one. Two sets of tensors have this property and share a
    message: the tensors of one unit; and the tensors of one round that no unit waits for. Any other tensor is sent
    alone.

    Attributes:
        source: the worker that computes them.
        reader: the worker that reads them.
        round: the number of transfers before them, one after another.
        of: the unit that computes them; None if no unit waits for them; a tensor's name if it is sent alone.
    """

    source: int
    reader: int
    round: int
    of: Unit | str | None

    @property
    def key(self) -> str:
        """A text that identifies the message within its step, on all workers."""
        of = f"{self.of.stage}/{self.of}" if isinstance(self.of, Unit) else self.of
        return f"{self.source}/{self.reader}/{self.round}/{of}"


def parcels(placement: StagePlacement) -> dict[StageMessage, list[str]]:
    """Returns all messages with their tensors, in the same order on all workers."""
    transfers = list(placement.crossings())
    _require_values(placement, transfers)
    rounds = count_rounds(placement.step.graph_index, dict.fromkeys((c.name for c in transfers), 0))
    leading = _leading_to_units(placement)
    found: dict[StageMessage, list[str]] = {}
    for transfer in transfers:
        node = node_of(transfer.name)
        alone = transfer.name if node in leading else None
        message = StageMessage(transfer.source, transfer.reader, rounds[node], placement.unit_of(node) or alone)
        found.setdefault(message, []).append(transfer.name)
    return found


def _require_values(placement: StagePlacement, transfers: Sequence[StageTransfer]) -> None:
    """Checks that every transferred tensor has a value in each step and can be sent.

    Raises:
        StrategyError: a tensor has no value or cannot be sent; the message names the tensor and both stages.
    """
    inside = set(find_inside(placement.graph_index))
    for transfer in transfers:
        kind = type_of(placement.graph_index, transfer.name)
        node = placement.graph_index.nodes[node_of(transfer.name)]
        if node.name in inside:
            reason = "is inside a loop or a branch, which is not split"
        elif kind in (RESOURCE, VARIANT):
            reason = "is a list of tensors or a resource, which cannot be sent"
        else:
            continue
        name = placement.step.replica_of(node.name)[1]
        source, reader = map(placement.stages.stage_of, (transfer.source, transfer.reader))
        raise OptionError(
            "stages",
            f"{name} ({node.op}) is computed by pipeline stage {source} and read by stage {reader}, but {reason}. Put "
            "the variables of its consumers and of its inputs into one stage.",
        )


def _leading_to_units(placement: StagePlacement) -> set[str]:
    """Returns the nodes that some unit waits for."""
    units = (name for name in placement.needed if placement.unit_of(name) is not None)
    return reach(units, placement.graph_index.sources.__getitem__)


class StageExchange:
    """Sends and receives one worker's stage messages.

    Args:
        editor: the editor of the step.
        placement: the placement of the step's nodes.
        context: the worker for which the step is rewritten.

    Attributes:
        received: for each received tensor, the tensor that replaces it on this worker.
    """

    def __init__(self, editor: StepEditor[Step], placement: StagePlacement, context: Context) -> None:
        self.editor, self.placement, self.context = editor, placement, context
        self.me = context.worker
        self.received: dict[str, str] = {}

    def exchange(self, sent: Mapping[StageMessage, list[str]]) -> None:
        """Adds this worker's sends and receives, and makes its nodes read the received tensors."""
        made: list[str] = []
        for message, names in sent.items():
            if self.me in (message.source, message.reader):
                made += self._exchange(message, names)
        for name, here in self.received.items():
            readers = [c for c in self.editor.consumers(node_of(name)) if self._is_mine(c)]
            self.editor.rewire(name, here, readers)
            self.editor.replace_output(name, here)
        self.editor.run(made)

    def _is_mine(self, name: str) -> bool:
        return self.me in self.placement.runs_at.get(name, ())

    def _exchange(self, message: StageMessage, names: list[str]) -> list[str]:
        specs = [self._spec(name) for name in names]
        # Programs of one run share queues by name: other tensors need other queues.
        descriptions = [f"{name} {spec.dtype.name} {spec.shape}" for name, spec in zip(names, specs, strict=True)]
        place = digest(f"{message.key};{';'.join(descriptions)}")
        with subgraph(self.editor, f"pipeline/{place}") as f, tf.device(self.context.cpu(self.context.worker)):
            exchange = Communicator(
                f, self.context, f"pipeline/{place}", Group.of_workers([message.source, message.reader])
            )
            if self.me == message.source:
                values = f.inputs_like(names, specs)
                exchange.send(message.reader, "needed", values)
                received = []
            else:
                received = exchange.receive(message.source, "needed", specs)
        self.received.update({name: f.name(value) for name, value in zip(names, received, strict=False)})
        return exchange.effects

    def _spec(self, name: str) -> tf.TensorSpec:
        """Returns a tensor's dtype, and its shape as far as it is known for a micro-batch."""
        step = self.placement.step
        kind = tf.as_dtype(type_of(step.graph_index, name))
        captured = step.replica_of(node_of(name))[1]
        known = step.spec_of(f"{captured}:{output_index(name)}")
        return tf.TensorSpec(known.shape if known.dtype == kind else None, kind)
