"""Steps: a training step in each phase of its rewriting; capture creates it and every kernel maps it to a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import tensorflow as tf

from autodist.graph.execution_order import ExecutionOrder
from autodist.graph.in_step_all_reduce import InStepAllReduce
from autodist.graph.index import GraphIndex
from autodist.graph.inferred_specs import infer_specs
from autodist.graph.names import node_of, output_index
from autodist.graph.origins import Origins, no_origins
from autodist.graph.parts import (
    EvenSharesRequired,
    GradientCall,
    OuterStep,
    PendingReduction,
    PipelinePart,
    Variable,
    VariableGradient,
)
from autodist.graph.stages import NO_STAGES, Stages
from autodist.graph.subgraph import SpecOf, unknown_spec
from autodist.layout import Propagation
from autodist.placement.holder import Holder, Slice
from autodist.placement.partitioning import Partitioning
from autodist.placement.synchrony import Synchrony
from autodist.sharding import Annotations, Sharding

EXAMPLES = "autodist/examples:0"
"""Placeholder of a replicated step, fed with this worker's number of examples (int64 scalar).

A worker without examples is fed one row and the number 0, because ops need not support empty batches. The results of
that row are ignored.
"""

ALL_EXAMPLES = "autodist/all_examples:0"
"""Placeholder of a replicated step, fed with the number of examples of all workers if it is known on each."""


UNEVEN = "autodist: replicas have different numbers of examples; in all"
"""Start of the error raised at run time if all replicas need equally many examples and the batch is uneven.

The number of examples follows it.
"""

_UNREAD = GraphIndex(tf.compat.v1.GraphDef())


@dataclass(frozen=True)
class Step:
    """A training step: a graph with its variables, inputs and results, and the properties that every phase has.

    Capture creates a `CapturedStep`. `AssignOwners` turns it into a `PlacedStep`, and `Replicate` turns that into a
    `ReplicatedStep`. Kernels declare the phases that they take and return.

    Attributes:
        graph_def: all nodes that `outputs` and `targets` need.
        variables: the variables that the step reads or writes, and no others.
        gradients: the recorded gradients, in the order of their creation.
        gradient_calls: the calls that created the gradients.
        holders: maps a captured variable to the groups that hold it, as far as earlier steps or the strategy have
            decided. Every worker holds those without an entry. After partitioning, `variables` has the shards.
        inputs: maps each tensor that is fed in every step to the axis along which it is split between replicas; None if
            every replica gets all of it.
        apart: maps each input that has another number of rows than the first split input to the first input with the
            same number. Both are split alike.
        outputs: tensors that the step returns.
        targets: nodes that run without being returned.
        noted: returns the static shape and dtype of a tensor that was captured or recorded by a kernel.
        origin_of: returns the line of the script that created a captured node.
        initializers: nodes that this worker runs once, before the first step that has them. They set the initial value
            of state that kernels keep between steps, such as the residual of a compressor. The key is the same in all
            programs that share the state, so a second program does not reset it.
        background_nodes: nodes of the background program that runs once for every step of this worker: updates of
            stale variables, and refreshes of their cached copies.
        standing_nodes: nodes of the standing program, whose runs begin before the steps that they belong to: updates of
            asynchronous variables.
        outer_steps: the outer steps that end local steps. The key is the same in all programs that share their state.
        jit_compile: True if the script requests XLA for the complete step. If it requests XLA for parts, the names of
            their nodes show it (`autodist.graph.jit_scope`).
        has_loops_for_xla: True if TensorFlow has built the step, with its loops, in a form that XLA can compile.
        is_global: True if every worker receives the same batch and keeps its share, so that each knows the total number
            of examples.
        counts_examples: True if the step has an additional last output, which is above 0 if any worker has examples.
        even_parts: the reason why all replicas need equally many examples; None if they do not.
        graph_index: index of `graph_def`; `replace` keeps it as long as the graph is the same.
    """

    graph_def: tf.compat.v1.GraphDef
    variables: tuple[Variable, ...] = ()
    gradients: tuple[VariableGradient, ...] = ()
    gradient_calls: tuple[GradientCall, ...] = ()
    holders: Mapping[str, Holder] = field(default_factory=dict)
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    noted: SpecOf = field(default=unknown_spec, compare=False, repr=False)
    origin_of: Origins = field(default=no_origins, compare=False, repr=False)
    initializers: Mapping[str, str] = field(default_factory=dict)
    background_nodes: tuple[str, ...] = ()
    standing_nodes: tuple[str, ...] = ()
    outer_steps: Mapping[str, OuterStep] = field(default_factory=dict)
    jit_compile: bool = False
    has_loops_for_xla: bool = False
    is_global: bool = False
    counts_examples: bool = False
    even_parts: EvenSharesRequired | None = None
    graph_index: GraphIndex = field(default=_UNREAD, compare=False, repr=False)
    _inferred: dict[str, tuple[tf.TensorSpec, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.graph_index.graph_def is not self.graph_def:
            object.__setattr__(self, "graph_index", GraphIndex(self.graph_def))

    def spec_of(self, name: str) -> tf.TensorSpec:
        """Returns the static shape and dtype of a tensor: as recorded, or as TensorFlow infers them for new nodes.

        Raises:
            KeyError: the graph has no such tensor.
        """
        try:
            return self.noted(name)
        except KeyError:
            if (node := node_of(name)) not in self._inferred:
                library = self.graph_def.library
                self._inferred[node] = infer_specs(self.graph_index.nodes, library, self.noted, node)
            return self._inferred[node][output_index(name)]

    def with_graph(self, graph_def: tf.compat.v1.GraphDef) -> Self:
        """Returns the same step with another graph."""
        return replace(self, graph_def=graph_def)

    def replica_of(self, node: str) -> tuple[int, str]:
        """Returns (index of the local replica, captured name) of a node; index 0 for nodes that replicas share."""
        return 0, node

    def part_of(self, node: str) -> tuple[int, str]:
        """Returns (position of the worker's coordinate on a mesh, name for its first coordinate) of a placed node."""
        return 0, node

    @property
    def nodes_apart(self) -> tuple[tuple[str, ...], ...]:
        """The nodes that run apart from the step, by program."""
        outer = (one.nodes for one in self.outer_steps.values())
        return self.background_nodes, self.standing_nodes, *outer, tuple(self.initializers.values())

    @cached_property
    def named(self) -> frozenset[str]:
        """The nodes that the fields of the step refer to; a rewrite keeps them and their inputs."""
        gradients = [t for gradient in self.gradients for t in gradient.tensors]
        calls = [name for call in self.gradient_calls for name in (call.seed, *call.targets)]
        calls += [term.tensor for call in self.gradient_calls for term in call.terms]
        tensors = [*self.outputs, *self.inputs, *gradients, *calls]
        nodes = [*self.targets, *self.initializers.values(), *(v.handle for v in self.variables)]
        return frozenset([*map(node_of, tensors), *nodes])

    @cached_property
    def batch_axes(self) -> dict[str, int]:
        """Maps each input that is split between replicas to the axis along which it is split."""
        return {name: axis for name, axis in self.inputs.items() if axis is not None}

    @cached_property
    def by_name(self) -> dict[str, Variable]:
        return {v.name: v for v in self.variables}

    @cached_property
    def by_handle(self) -> dict[str, Variable]:
        """Maps the name of each VarHandleOp to its variable."""
        return {v.handle: v for v in self.variables}


Phase = TypeVar("Phase", bound=Step)
"""The phase of a step that a function or a kernel keeps."""


@dataclass(frozen=True)
class CapturedStep(Step):
    """A step as captured: the computation that one device would run.

    Attributes:
        in_step_all_reduces: those that run while the step computes, in the order of their creation.
        flows: dependence of the captured tensors on the batch, set if a kernel has changed the graph in ways that
            propagation does not follow.
        is_whole: True if each worker needs the complete outputs, with the rows of all workers in order, and nothing may
            be guessed: a step that is not proven equal to that of one device is rejected.
        rows: examples for each replica if the graph was built for that number only; None: any number.
        annotations: the requested shardings; None: there are none.
    """

    in_step_all_reduces: tuple[InStepAllReduce, ...] = ()
    flows: Propagation | None = None
    is_whole: bool = False
    rows: int | None = None
    annotations: Annotations | None = None

    @cached_property
    def named(self) -> frozenset[str]:
        return super().named.union(s.node for s in self.in_step_all_reduces)


@dataclass(frozen=True)
class StepWithOwners(Step):
    """A step whose variables have owners.

    Attributes:
        pipeline_parts: for a pipeline, the parts of the captured nodes of the compute part, as far as known, and of the
            nodes that a kernel has created to recompute them.
        shardings: of the variables that are divided over a mesh, by name. Their shapes are those of one place's part.
        parts: for a worker with several coordinates on a mesh, apart from those on the axis of the batch: maps the copy
            of a node for a coordinate to (position of the coordinate, name of the node for the first one).
    """

    pipeline_parts: Mapping[str, PipelinePart] = field(default_factory=dict)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    parts: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def part_of(self, node: str) -> tuple[int, str]:
        return self.parts.get(node, (0, node))

    @cached_property
    def slices(self) -> dict[str, Slice]:
        """Maps the name of each variable that has a holder, or of each of its shards, to the slice that it stores."""
        return {name + one.name: one for name, holder in self.holders.items() for one in holder.slices}

    @cached_property
    def owners(self) -> dict[str, int]:
        """Maps variables and shards to the workers that own them; every worker holds those without an owner."""
        return {name: one.owner for name, one in self.slices.items() if one.owner is not None}

    @cached_property
    def partitionings(self) -> dict[str, Partitioning]:
        """Maps the partitioned variables to their partitionings."""
        return {name: one.partitioning for name, one in self.holders.items() if one.partitioning is not None}


@dataclass(frozen=True)
class PlacedStep(CapturedStep, StepWithOwners):
    """A captured step whose variables have owners; kernels partition its variables and updates."""

    @classmethod
    def of(cls, step: CapturedStep, **placed: Any) -> PlacedStep:
        """Returns a captured step with values for the fields that describe its placement."""
        return cls(**{**_fields_of(step, CapturedStep), **placed})


@dataclass(frozen=True)
class ReplicatedStep(StepWithOwners):
    """The step of one worker, with a copy of the compute part for each of its replicas.

    Attributes:
        stages: the nodes that run once, as they were before replication; they keep their names. Empty for a single
            replica, since nothing is reduced.
        copies: maps a node that exists once per replica to (index of the local replica, captured name). The copies of
            the first replica keep their captured names.
        reductions: the reductions over replicas that no kernel has replaced yet.
        reduced_gradients: the tensors that nodes outside the replicas read in place of the replicas' gradients.
        backward: for each backward pass, the captured nodes that depend on its seed. Empty if no blocks are recomputed.
        synchrony_of: maps a variable with an owner or with local steps, and its slots, to its synchronization.
        own_state: the reductions of values that stay each worker's own, since the step waits for no other worker.
        gathered_reads: the captured reads whose values the owners send to all replicas, in one message for each layer.
        order: execution order of the step if an owner holds variables; computed while `reductions` is complete.
    """

    stages: Stages = NO_STAGES
    copies: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    reductions: tuple[PendingReduction, ...] = ()
    reduced_gradients: frozenset[str] = frozenset()
    backward: tuple[frozenset[str], ...] = ()
    synchrony_of: Mapping[str, Synchrony] = field(default_factory=dict)
    own_state: tuple[PendingReduction, ...] = field(default=(), repr=False)
    gathered_reads: frozenset[str] = frozenset()
    order: ExecutionOrder | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, step: PlacedStep, **replicated: Any) -> ReplicatedStep:
        """Returns a placed step with values for the fields that describe its replicas and reductions."""
        return cls(**{**_fields_of(step, StepWithOwners), **replicated})

    @cached_property
    def trained(self) -> dict[str, str]:
        """Maps each tensor that stands for a gradient to be reduced to its variable."""
        return {t: j.variable for j in self.reductions if j.variable is not None for t in j.result}

    def replica_of(self, node: str) -> tuple[int, str]:
        return self.copies.get(node, (0, node))


def _fields_of(step: Step, phase: type[Step]) -> dict[str, Any]:
    """Returns the values of the fields that a phase has."""
    return {one.name: getattr(step, one.name) for one in fields(phase) if one.init}
