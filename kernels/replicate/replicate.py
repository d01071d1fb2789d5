"""Replicate: copies the compute part for each replica of this worker, and reduces the values read outside of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.execution_order import settle_depths
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.names import is_control, node_of, output_index
from autodist.graph.ops import Trait, having
from autodist.graph.origins import Origins
from autodist.graph.parts import PendingReductionKind, Variable
from autodist.graph.recomputation import backward_passes
from autodist.graph.seeds import replica_dependent_seeds
from autodist.graph.stages import Stages
from autodist.graph.step import PlacedStep, ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SpecOf
from autodist.graph.waiting import free_constants
from autodist.kernels.base import Context, Kernel
from autodist.kernels.replica_dependent import find_replica_dependent, sources_of
from autodist.kernels.replicate.advance_generators import STRIDE, AddedToDraws, offset_seeds, reads_to_offset
from autodist.kernels.replicate.draw_by_key import all_examples, draw_for_all, find_shared_seed_draws
from autodist.kernels.replicate.draw_in_functions import draw_in_functions
from autodist.kernels.replicate.reductions import (
    GlobalState,
    GradientReductions,
    InStepAllReduces,
    OutputReductions,
    Reducer,
    StateReductions,
    Statistics,
)
from autodist.kernels.replicate.split_batch import split_batch
from autodist.kernels.replicate.state_writes import StateChange, take_state_writes
from autodist.layout import Kind, PerExample, Propagation, Unknown

_SEEDED = having(Trait.SEEDED)


@dataclass(frozen=True)
class Replicate(Kernel[PlacedStep, ReplicatedStep]):
    """Copies the nodes that differ between replicas, splits the batch, and sums over the local replicas.

    The first local replica is the captured graph itself. The nodes of replica k of this worker are named
    `autodist/replica_k/…`. Nodes that do not depend on the batch, a replica's weight or a random draw run once. The
    replicated step lists the reductions over other workers.

        x → f → g → update      becomes      x[:n] → f → g   ┐
                                             x[n:] → f'→ g'  ┴ add → update
    """

    name: ClassVar[str] = "replicate"
    after: ClassVar[Mapping[str, str]] = {
        "partition-variables": "shards are reduced, not whole variables",
        "add-rows-in-order": "a parameter server runs the writes of rows in the order set there",
        "advance-generators": "it decides which draws all replicas share",
        "assign-stages": "the copies belong to the stage of the captured node",
    }

    def apply(self, step: PlacedStep, context: Context) -> ReplicatedStep:
        if context.goes_through_stages(step):
            context = context.of_replicas
        if context.single_replica:
            return ReplicatedStep.of(step, backward=_backward_of(step, context))
        return _Replication(step, context).run()


class _Replication:
    """The work of one `Replicate.apply`, in the order of `run`."""

    def __init__(self, step: PlacedStep, context: Context) -> None:
        self.step, self.context = step, context
        self.stages: Stages = find_stages(step)
        self.flows: Propagation = step.flows or flows_of(step)
        self.editor = StepEditor(step)
        self.captured_seeds = {n.name: n.attr["seed2"].i for n in step.graph_index.having(Trait.SEEDED)}

    def run(self) -> ReplicatedStep:
        self._free_constants()
        states = reads_to_offset(self.editor, self.step)
        draws = [node for node, _ in states]
        replica_dependent = set(
            find_replica_dependent(
                self.step, sources_of(self.step, replica_dependent_seeds(self.step, self.flows), draws), self.stages
            )
        )
        added = self._draw_for_own_examples(states, replica_dependent)
        changes = take_state_writes(self.editor, self.step, self.stages, replica_dependent)
        replica_dependent |= {node_of(c.after) for c in changes}.union(*(c.added for c in changes))
        replica_dependent.update(added.nodes)
        clones = self._clone(frozenset(replica_dependent) - set(map(node_of, self.step.inputs)))
        self._vary_draws(clones, added.indices)
        parts = split_batch(self.editor, self.step, clones)
        self._order_after_all(clones)
        reducer = Reducer(
            self.editor, self.step, self.context, self.stages, self.flows, parts, frozenset(replica_dependent)
        )
        InStepAllReduces(reducer).reduce()
        gradients = GradientReductions(reducer)
        gradients.weigh_losses()
        gradients.reduce_gradients()
        statistics = Statistics(reducer)
        gradients.reduce_boundary(statistics)
        whole = GlobalState(reducer, changes, statistics)
        StateReductions(reducer, whole).reduce_state(changes)
        output_reductions = OutputReductions(reducer, whole, statistics)
        output_reductions.reduce_texts()
        outputs = output_reductions.reduce_outputs()
        some_examples = reducer.some_examples()
        self.editor.set_outputs([*outputs, *([some_examples] if some_examples else ())])
        self.editor.drop_targets(w for w in self.stages.state_writes if w in replica_dependent)  # they became values
        self._run_all(clones)
        self.editor.run([*(c.write for c in changes), *reducer.checks])
        known = self.step.pipeline_parts
        copies = {copy: (k, name) for k, renamed in enumerate(clones) for name, copy in renamed.items()}
        edited = self.editor.to_step()
        return ReplicatedStep.of(
            edited,
            variables=(*edited.variables, *_copies_of(changes, clones)),
            origin_of=_origins_of_copies(self.step.origin_of, copies),
            noted=self._specs_of_copies(edited.noted, copies),
            inputs={**self.step.inputs, **parts.given},
            pipeline_parts={**known, **{name: known[draw] for name, draw in added.nodes.items() if draw in known}},
            stages=self.stages,
            copies=copies,
            backward=_backward_of(self.step, self.context),
            reductions=settle_depths(edited.graph_index, reducer.reductions),
            reduced_gradients=frozenset(
                t for j in reducer.reductions if j.kind is PendingReductionKind.GRADIENT for t in j.result
            ),
            counts_examples=some_examples is not None,
            even_parts=reducer.even_parts,
        )

    def _free_constants(self) -> None:
        """Removes control inputs of constants: otherwise, replicas that share one would wait for each other."""
        free_constants(self.editor, self.step.graph_index, {*map(node_of, self.step.outputs), *self.step.targets})

    def _draw_for_own_examples(self, states: list[tuple[str, str]], replica_dependent: set[str]) -> AddedToDraws:
        """Makes random draws equal those of one device, if possible, or differ between replicas."""
        alike = list(find_shared_seed_draws(self.step, self.flows, replica_dependent))
        examples = all_examples(self.step, self.context)
        whole = [draw for draw in alike if draw.axis is not None and examples is not None]
        apart = [(draw.node, draw.seed) for draw in alike if draw not in whole]
        added = offset_seeds(self.editor, self.step, [*states, *apart])
        replicas = self.context.group.size
        added |= draw_in_functions(self.editor, self.step, self.flows, replica_dependent, examples, replicas)
        if examples is None:
            return added
        return added | draw_for_all(self.editor, self.step, whole, examples, replicas)

    def _clone(self, replica_dependent: frozenset[str]) -> list[dict[str, str]]:
        """Returns, for each local replica, the names of its copies; the first replica keeps the captured names."""
        names = [name for name in self.editor.names if name in replica_dependent]
        count = len(self.context.copied_replicas)
        return [{name: name for name in names}] + [
            self.editor.clone(names, f"autodist/replica_{k}/") for k in range(1, count)
        ]

    def _vary_draws(self, clones: list[dict[str, str]], indices: Sequence[str]) -> None:
        for renamed, replica in zip(clones, self.context.copied_replicas, strict=True):
            for name in indices:
                self.editor[renamed[name]].attr["value"].tensor.int64_val[0] *= replica
            for name, copy in renamed.items():
                node = self.editor[name]
                if node.op in _SEEDED and (node.attr["seed"].i or node.attr["seed2"].i):
                    seed = self.captured_seeds[name] + replica * STRIDE
                    self.editor[copy].attr["seed2"].i = seed % 2**31

    def _order_after_all(self, clones: list[dict[str, str]]) -> None:
        """Orders nodes after all copies of a node if they are ordered after the captured node."""
        copied = clones[0]
        copies = set().union(*(renamed.values() for renamed in clones))
        for name in {consumer for source in copied for consumer in self.editor.consumers(source)} - copies:
            more = [
                renamed[node_of(i)]
                for i in self.editor[name].input
                if is_control(i) and node_of(i) in copied
                for renamed in clones[1:]
            ]
            if more:
                self.editor.add_control(name, more)

    def _specs_of_copies(self, noted: SpecOf, copies: Mapping[str, tuple[int, str]]) -> SpecOf:
        """Returns the specs of the replicated step.

        If batches have a fixed length, the batch axis of copies becomes open. Otherwise the captured specs hold for the
        parts of a batch, too.
        """
        step = self.step
        if not any(_has_length(step.spec_of(name), axis) for name, axis in step.batch_axes.items()):
            return noted

        def spec_of(name: str) -> tf.TensorSpec:
            if node_of(name) not in copies:
                return noted(name)
            node = copies[node_of(name)][1]
            captured = f"{node}:{output_index(name)}"
            is_known = node in step.graph_index.nodes  # otherwise, the node is a draw that replaces a captured one
            return _part_of(noted(captured), self.flows.kind(captured) if is_known else Unknown("it was not captured"))

        return spec_of

    def _run_all(self, clones: list[dict[str, str]]) -> None:
        """Adds the copies of the captured step's targets to the targets."""
        for name in self.editor.targets:
            if name in clones[0]:
                self.editor.replace_target(name, [renamed[name] for renamed in clones])


def _backward_of(step: PlacedStep, context: Context) -> tuple[frozenset[str], ...]:
    """Returns the nodes of the backward passes if blocks are recomputed: the seeds that lead to them are replaced."""
    return backward_passes(step) if context.plan.recomputed_blocks else ()


def _copies_of(changes: Sequence[StateChange], clones: Sequence[Mapping[str, str]]) -> Iterator[Variable]:
    """Yields the variables from which each replica's branches and loops read what it has written before."""
    for copy in (copy for change in changes for copy in change.copies):
        for renamed in clones:
            handle = renamed[copy.handle]
            yield replace(copy, name=f"{handle.removesuffix(copy.handle)}{copy.name}", handle=handle)


def _has_length(spec: tf.TensorSpec, axis: int) -> bool:
    return spec.shape.rank is None or spec.shape[axis] is not None


def _part_of(spec: tf.TensorSpec, kind: Kind) -> tf.TensorSpec:
    """Returns the spec of a replica's part of a tensor."""
    if spec.shape.rank is None:
        return spec
    match kind:
        case PerExample():
            lengths = [None if axis == kind.axis else length for axis, length in enumerate(spec.shape.as_list())]
            return tf.TensorSpec(lengths, spec.dtype)
        case Unknown():
            return tf.TensorSpec([None] * spec.shape.rank, spec.dtype)
    return spec


def _origins_of_copies(origin_of: Origins, copies: Mapping[str, tuple[int, str]]) -> Origins:
    """Returns the origin of the captured node for each of its copies."""
    return lambda name: origin_of(copies[name][1] if name in copies else name)
