"""Step: a captured training step, the value that capture makes and every kernel maps to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import tensorflow as tf

from autodist.graph.execution_order import ExecutionOrder
from autodist.graph.in_step_all_reduce import InStepAllReduce
from autodist.graph.index import GraphIndex
from autodist.graph.inferred_specs import infer_specs
from autodist.graph.names import node_of, output_index
from autodist.graph.origins import Origins, no_origins
from autodist.graph.parts import EvenParts, GradientCall, PendingReduction, Variable, VariableGradient
from autodist.graph.pipeline_part import PipelinePart
from autodist.graph.placement import EVERY_WORKER, Partitioning, Placement, VariablePlacement, shard_name
from autodist.graph.propagation import Propagation
from autodist.graph.stages import Stages
from autodist.graph.subgraph import SpecOf, nothing_known

EXAMPLES = "autodist/examples:0"
"""The placeholder, in a replicated step, that is fed the number of examples of this worker (int64 scalar).

A worker without examples is fed one row all the same, and 0 here: ops need not bear empty batches, and what the row
gives is left out.
"""

ALL_EXAMPLES = "autodist/all_examples:0"
"""The placeholder, in a replicated step, that is fed the number of examples of all workers, where each knows it."""


UNEVEN = "autodist: replicas have different numbers of examples; in all"
"""What stops a step, where it is not known before it runs, whose replicas all need equally many: the number follows."""

_UNREAD = GraphIndex(tf.compat.v1.GraphDef())


@dataclass(frozen=True)
class Replication:
    """What is known of a replicated step, for the kernels after `Replicate`.

    Attributes:
        stages: what runs once, as it was before; those nodes keep their names.
        copies: for each node that a replica has of its own, which of this worker's replicas it is for, and its captured
            name; the first one's keep their names.
        joins: what the replicas made and has to be combined, as far as it is not yet.
        joined_gradients: the tensors that what runs once reads in place of the replicas' gradients.
        keepers: for each variable that is owned, how its owner keeps it.
        counts_examples: whether the step's last output is none of the script's, but above 0 if any worker has examples.
        even_parts: that all replicas need equally many examples, and why; None where they do not.
        order: of all that the step does, where an owner keeps variables; found while `joins` has all joins.
    """

    stages: Stages
    copies: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    joins: tuple[PendingReduction, ...] = ()
    joined_gradients: frozenset[str] = frozenset()
    variable_placements: Mapping[str, VariablePlacement] = field(default_factory=dict)
    counts_examples: bool = False
    even_parts: EvenParts | None = None
    order: ExecutionOrder | None = field(default=None, compare=False, repr=False)

    @cached_property
    def trained(self) -> dict[str, str]:
        """For each tensor that stands for a gradient which has to be combined, its variable."""
        return {t: j.variable for j in self.joins if j.variable is not None for t in j.result}


@dataclass(frozen=True)
class Step:
    """A training step as it was captured: what one device would run.

    Attributes:
        graph_def: all that `outputs` and `targets` need.
        variables: what the step reads or writes, and no others.
        gradients: those that were noted, in the order in which they were made.
        gradient_calls: the calls that made them.
        whole_sums: what the step adds up over all replicas while it computes, in the order in which it was made.
        inputs: tensors that are given anew for every step; the axis along which each is split between replicas,
            None where every replica gets the whole.
        apart: inputs that have other numbers of rows than the first one that is split, and are split by these; of each,
            the first input that has as many.
        outputs: tensors that the step returns.
        targets: nodes that run without being returned.
        noted: static shape and dtype of a tensor of the captured graph, and of what kernels have noted since.
        origin_of: where the script has made a captured node.
        owners: the worker that holds a variable (or a shard), by its name; every worker holds the others.
        mates: for an owner, others that hold the same.
        cuts: how variables are cut, by the captured variable's name; `variables` has their shards in their place.
        flows: how the captured tensors depend on the batch, where a kernel has changed the graph since in ways that
            propagation does not follow.
        initializers: nodes that this worker runs once, before the first step that has them: what kernels keep between
            steps (the residual of a compressor, say) gets its first value. By a key that is the same in all programs
            that share the state, so that a second program does not set it again.
        served: nodes that the owner of stale variables runs once for every step, beside it.
        landed: nodes that end, run between two steps, once all is written that this worker's steps have asked for.
        copies: suffixes of a variable's name in the session under which every worker has copies of it.
        jit_compile: whether the script asks XLA to compile all of the step. Where it asks for parts, the names of their
            nodes say so (`autodist.graph.jit_scope`).
        is_global: whether every worker is given the same batch, of which it keeps its share, so that each knows how
            many examples there are in all.
        is_whole: whether each worker is to have the whole of what the step returns, rows of all workers in order, and
            nothing may be guessed: a step of which it is not known how it is that of one device is refused.
        rows: how many examples each replica gets where the graph was made for that number alone; None: as many as there
            are.
        replication: what came of replicating the step; None until it is, and where there is one replica alone.
        pipeline_parts: of a pipeline, where the captured nodes of the compute part belong, as far as it is known, and
            those that a kernel has made of them to compute them anew.
        wiring: how the nodes of `graph_def` hang together; `replace` hands it on for as long as the graph is the same.
    """

    graph_def: tf.compat.v1.GraphDef
    variables: tuple[Variable, ...] = ()
    gradients: tuple[VariableGradient, ...] = ()
    gradient_calls: tuple[GradientCall, ...] = ()
    whole_sums: tuple[InStepAllReduce, ...] = ()
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    noted: SpecOf = field(default=nothing_known, compare=False, repr=False)
    origin_of: Origins = field(default=no_origins, compare=False, repr=False)
    owners: Mapping[str, int] = field(default_factory=dict)
    stage_group: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cuts: Mapping[str, Partitioning] = field(default_factory=dict)
    flows: Propagation | None = None
    initializers: Mapping[str, str] = field(default_factory=dict)
    served: tuple[str, ...] = ()
    flush_targets: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    jit_compile: bool = False
    is_global: bool = False
    is_whole: bool = False
    rows: int | None = None
    replication: Replication | None = None
    pipeline_parts: Mapping[str, PipelinePart] = field(default_factory=dict)
    graph_index: GraphIndex = field(default=_UNREAD, compare=False, repr=False)
    _inferred: dict[str, tuple[tf.TensorSpec, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.graph_index.graph_def is not self.graph_def:
            object.__setattr__(self, "graph_index", GraphIndex(self.graph_def))

    def spec_of(self, name: str) -> tf.TensorSpec:
        """Static shape and dtype of a tensor, as noted; else, as of nodes that kernels made, as TensorFlow infers them.

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

    def with_graph(self, graph_def: tf.compat.v1.GraphDef) -> Step:
        """The same step with another graph; the original is left unchanged."""
        return replace(self, graph_def=graph_def)

    def replica_of(self, node: str) -> tuple[int, str]:
        """Which of this worker's replicas a node is for, and its captured name; for what all share, the first."""
        shared = 0, node
        return self.replication.copies.get(node, shared) if self.replication else shared

    def placement(self, variable: str) -> Placement:
        """Where the value of a captured variable lies, once owners are assigned."""
        cut = self.cuts.get(variable)
        names = [variable] if cut is None else [shard_name(variable, k) for k in range(len(cut.sizes))]
        owners = tuple(self.owners.get(name, EVERY_WORKER) for name in names)
        copies = tuple(tuple(sorted(self.copies.get(name, ()))) for name in names)
        return Placement(cut, owners, copies, self.stage_group.get(owners[0], ()) if cut is None else ())

    @cached_property
    def named(self) -> frozenset[str]:
        """The nodes that the item names: a rewrite keeps them, and all that they need."""
        gradients = [t for gradient in self.gradients for t in gradient.tensors]
        calls = [name for call in self.gradient_calls for name in (call.seed, *call.targets)]
        calls += [term.tensor for call in self.gradient_calls for term in call.terms]
        tensors = [*self.outputs, *self.inputs, *gradients, *calls]
        nodes = [
            *self.targets,
            *(s.node for s in self.whole_sums),
            *self.initializers.values(),
            *(v.handle for v in self.variables),
        ]
        return frozenset([*map(node_of, tensors), *nodes])

    @cached_property
    def by_name(self) -> dict[str, Variable]:
        return {v.name: v for v in self.variables}

    @cached_property
    def by_handle(self) -> dict[str, Variable]:
        """The variable for the name of each VarHandleOp."""
        return {v.handle: v for v in self.variables}


def place_variables(item: Step, placements: Mapping[str, Placement]) -> Step:
    """The item with what is known of where its variables lie, by the captured variables' names."""
    owners: dict[str, int] = {}
    cuts = {name: placement.cut for name, placement in placements.items() if placement.cut is not None}
    for name, placement in placements.items():
        names = [name] if placement.cut is None else [shard_name(name, k) for k in range(len(placement.owners))]
        owners.update(zip(names, placement.owners, strict=True))
    return replace(item, owners=owners, cuts=cuts)
