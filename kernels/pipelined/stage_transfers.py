"""What travels between the workers of a pipeline: which tensors together, by which queues."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.control_flow import find_inside
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.op_types import RESOURCE, VARIANT, type_of
from autodist.graph.pipeline_schedule import Unit
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import reach
from autodist.kernels.base import Context
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.pipelined.stage_placement import StagePlacement, StageTransfer
from autodist.options.fields import OptionError


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
