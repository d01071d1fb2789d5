"""Owners send the shards of a layer's parameters to the other workers, in one message for each gather."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.names import is_control, node_of
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.place.gather_layers import GATHER
from autodist.placement.synchrony import SyncMode


@dataclass(frozen=True)
class SendLayers(Kernel[ReplicatedStep, ReplicatedStep]):
    """Replaces reads of other workers' shards by messages from the owners, in steps that all workers run together.

    The owner sends its shards of a layer once its own reads of the layer run, so it is never further ahead of the
    others than the gates of the reads allow (`GatherLayers`). All workers gather the layers in the same order, so none
    waits for a message that its source sends later than one that waits for it. Reads that no reduction needs remain:
    `ParameterServers` replaces those of other workers. A worker may run a step without reductions alone.

        at the owner   read(v) → f   becomes   read(v) → f, send;    elsewhere   read(v) → f   becomes   receive → f
    """

    name: ClassVar[str] = "send-layers"
    after: ClassVar[Mapping[str, str]] = {
        "set-sync-mode": "the execution order has the reads that messages replace",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if not (context.workers > 1 and step.synchrony_of):
            return step
        gathers = _find_gathers(step, context)
        if not gathers:
            return step
        editor = StepEditor(step)
        if context.computes:
            for number, reads in sorted(gathers.items()):
                _send(editor, context, number, reads)
        captured = frozenset(step.replica_of(read.node)[1] for reads in gathers.values() for read in reads)
        return replace(editor.to_step(), gathered_reads=captured)


@dataclass(frozen=True, order=True)
class _Read:
    """A read of a variable or shard that worker `owner` holds."""

    variable: str
    node: str
    owner: int


def _find_gathers(step: ReplicatedStep, context: Context) -> dict[int, list[_Read]]:
    """Returns the reads of each gather, in the same order on all workers."""
    reduced = [t for one in step.reductions for t in one.local]
    outputs = step.outputs if context.reduces_outputs else ()
    needed = StepEditor(step).ancestors([*reduced, *outputs]) if reduced else set()
    found: dict[int, list[_Read]] = {}
    for node in step.graph_def.node:
        if GATHER not in node.attr or node.name not in needed:
            continue
        name = step.by_handle[node_of(node.input[0])].name
        if step.synchrony_of[name].mode is SyncMode.SYNCHRONOUS and step.owners[name] in context.group:
            found.setdefault(node.attr[GATHER].i, []).append(_Read(name, node.name, step.owners[name]))
    return {number: sorted(reads) for number, reads in found.items()}


def _send(editor: StepEditor[ReplicatedStep], context: Context, number: int, reads: list[_Read]) -> None:
    what = digest(";".join(f"{read.variable} {editor.shape(read.node)}" for read in reads))
    by_owner: dict[int, list[_Read]] = {}
    for read in reads:
        by_owner.setdefault(read.owner, []).append(read)
    own = by_owner.pop(context.worker, [])
    with editor.subgraph(f"gather/{number}") as f, tf.device(context.cpu(context.worker)):
        exchange = Communicator(f, context, f"gather/{number}/{what}", context.group)
        if own:
            exchange.broadcast("shards", f.inputs(read.node for read in own), context.group.workers)
        specs = {owner: [editor.spec(read.node) for read in theirs] for owner, theirs in by_owner.items()}
        received = exchange.receive_each("shards", specs)
    for owner, theirs in by_owner.items():
        for read, value in zip(theirs, received[owner], strict=True):
            gates = [i for i in editor[read.node].input if is_control(i)]
            editor.pass_on(read.node, f.name(value), value.dtype, gates)
    editor.run(exchange.effects)
