"""SignalParts: workers read each other's parts of variables between two steps, all of the same step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.names import node_of
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.shard.holders import divided_variables, part_index
from autodist.kernels.shard.lower_reshards import group_of
from autodist.placement.partitioning import shard_name


@dataclass(frozen=True)
class SignalParts(Kernel[ReplicatedStep, ReplicatedStep]):
    """Names the parts of variables that a mesh divides, and sends signals between the workers that have the parts."""

    name: ClassVar[str] = "signal-parts"
    after: ClassVar[Mapping[str, str]] = {
        "partition-variables": "the parts may be partitioned",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.mesh is None:
            return step
        editor = StepEditor(step)
        _signal_writes(editor, step, context)
        for name, sharding in step.shardings.items():
            for handle, coordinate in _handles(step, name):
                index = part_index(context.mesh, context.place_of(0, coordinate), sharding)
                editor[handle].attr["shared_name"].s += shard_name("", index).encode()
        return editor.to_step()


def _handles(step: ReplicatedStep, name: str) -> Iterator[tuple[str, int]]:
    """Yields the handles of this worker's parts of a variable, each with the position of its coordinate."""
    holder = step.holders.get(name)
    stored = [name] if holder is None else [name + one.name for one in holder.slices]
    handles = [step.by_name[one].handle for one in stored]
    yield from ((handle, 0) for handle in handles)
    yield from ((copy, coordinate) for copy, (coordinate, copied) in step.parts.items() if copied in handles)


def _signal_writes(editor: StepEditor[ReplicatedStep], step: ReplicatedStep, context: Context) -> None:
    """Makes writes of divided variables wait until all workers have begun the step; its end waits for all writes.

    Between two steps, a worker may therefore read the parts of the others: all are of the same step. It reads a part of
    the first place that has it. These places differ on the axes that divide variables, and are the first on all others.
    """
    assert context.mesh is not None, "only a mesh divides variables"
    mesh, across = context.mesh, context.model_axes
    axes = mesh.names if step.holders and mesh.count(across) > 1 else across
    group, me = group_of(range(mesh.size), context), context.worker
    first = group_of(mesh.row(0, axes), context)
    others, owners = ([worker for worker in one.workers if worker != me] for one in (group, first))
    names = sorted(divided_variables(step, context))
    divided = {handle for name in names for handle, _ in _handles(step, name)}
    effects = step.graph_index.effects
    writes = [name for name, effect in effects.items() if effect.writes & divided and name in editor]
    if not writes or not others:
        return
    group_of_owner = context.placement.stages.group_of
    away = {step.by_name[name].handle for name, owner in step.owners.items() if me not in group_of_owner(owner)}
    own = [name for name in writes if effects[name].writes & divided - away]
    key = f"written_parts/{digest(';'.join(names))}"
    gates: list[str] = []
    with editor.subgraph(key) as f, tf.device(context.cpu(me)):
        exchange, token = Communicator(f, context, key, group), tf.constant(True)
        exchange.broadcast("begun", [token], owners)
        if me in first:
            begun = exchange.receive_each("begun", {worker: [token] for worker in others})
            gates = [node_of(f.name(tensors[0])) for tensors in begun.values()]
            exchange.broadcast("written", [token], others, after=own)
        exchange.receive_each("written", {worker: [token] for worker in owners})
    editor.run(exchange.effects)
    for name in own:
        editor.add_control(name, gates)
