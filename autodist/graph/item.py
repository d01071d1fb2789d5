"""GraphItem: a captured training step, the value that capture makes and every kernel maps to another."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from autodist.graph.keeper import Keeper
from autodist.graph.names import node_of
from autodist.graph.placement import EVERY_WORKER, Cut, Placement, shard_name
from autodist.graph.wiring import Wiring

if TYPE_CHECKING:
    from autodist.graph.propagation import Propagation
    from autodist.graph.stages import Stages


EXAMPLES = "autodist/examples:0"
"""The placeholder, in a replicated step, that is fed the number of examples of this worker (int64 scalar).

A worker without examples is fed one row all the same, and 0 here: ops need not bear empty batches, and what the row
gives is left out.
"""


_UNREAD = Wiring(tf.compat.v1.GraphDef())


def _no_specs(tensor: str) -> tf.TensorSpec:
    raise KeyError(f"nothing is known of {tensor}: this step was not captured from a graph")


class Aggregation(enum.Enum):
    """What is declared of writes that the compute part makes to a variable."""

    NONE = "none"
    MEAN = "mean"
    SUM = "sum"
    ONLY_FIRST_REPLICA = "only_first_replica"


@dataclass(frozen=True)
class Variable:
    """A variable that the script created.

    Attributes:
        name: unique in the graph, the name that strategies use ("dense/kernel").
        handle: name of its VarHandleOp node.
        shape: length of each axis, fully known.
        dtype: of its elements.
        trainable: as the script declared it.
        aggregation: as the script declared it (Keras declares one for each of its variables).
        is_seed: whether it is the state of a random generator, which replicas must read differently.
    """

    name: str
    handle: str
    shape: tuple[int, ...]
    dtype: tf.DType
    trainable: bool
    aggregation: Aggregation = Aggregation.NONE
    is_seed: bool = False

    @property
    def byte_size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size


class RowJoin(enum.Enum):
    """How the rows of a sparse gradient that replicas make become those that one device makes of the whole batch."""

    IN_TURN = "in turn"  # each belongs to examples: they stand one after the other, also where indices repeat
    ALIGNED = "aligned"  # all replicas have the same indices: rows of one position are added
    BY_INDEX = "by index"  # no index comes twice: rows of one index are added


@dataclass(frozen=True)
class Gradient:
    """The gradient of one variable, before clipping or any arithmetic of an optimizer.

    No tensor belongs to two gradients: capture gives each variable its own where the maths gives both the same.

    Attributes:
        variable: name of the variable.
        tensors: ("values:0",) if dense, ("indices:0", "values:0") if sparse.
        call: index into GraphItem.gradient_calls.
        row_join: how it is joined, if it is sparse.
    """

    variable: str
    tensors: tuple[str, ...]
    call: int
    row_join: RowJoin = RowJoin.IN_TURN

    @property
    def is_sparse(self) -> bool:
        return len(self.tensors) == 2


@dataclass(frozen=True)
class GradientCall:
    """One call of `gradient`: what was differentiated and by which weight the result is multiplied.

    Attributes:
        targets: the tensors that were differentiated, the loss mostly.
        seed: node that holds the weight, a PlaceholderWithDefault of 1; the gradients are proportional to it.
    """

    targets: tuple[str, ...]
    seed: str


class JoinKind(enum.Enum):
    """What a join is for; joins of different kinds never share a bucket."""

    GRADIENT = "gradient"
    BOUNDARY = "boundary"  # what an update asks of the compute part besides gradients
    STATE = "state"  # what the compute part writes, and outputs


@dataclass(frozen=True)
class Join:
    """A tensor that is summed over all replicas of all workers.

    Attributes:
        name: the same on all workers.
        kind: what it is for.
        local: this worker's part of the sum: ("sum:0",) if dense, ("indices:0", "values:0") if it is rows.
        result: the tensors that consumers read; where this worker is not alone, a synchronizer gives them another.
        weight: this worker's part of the weight by which the whole sum is divided; None: it is a sum.
        level: update stage, from 1.
        dtype: of the values.
        shape: of the values; the first axis of rows is open.
        variable: whose gradient it is, if it is one.
        index_dtype: of the indices, if it is rows.
        weight_dtype: of the weight, if there is one.
        row_join: how rows are joined, if it is rows.
    """

    name: str
    kind: JoinKind
    local: tuple[str, ...]
    result: tuple[str, ...]
    weight: str | None
    level: int
    dtype: tf.DType
    shape: tf.TensorShape
    variable: str | None = None
    index_dtype: tf.DType | None = None
    weight_dtype: tf.DType | None = None
    row_join: RowJoin = RowJoin.IN_TURN

    @property
    def is_sparse(self) -> bool:
        return len(self.local) == 2


@dataclass(frozen=True)
class GraphItem:
    """A training step as it was captured: what one device would run.

    Attributes:
        graph_def: all that `outputs` and `targets` need.
        variables: what the step reads or writes, and no others.
        gradients: those that were noted, in the order in which they were made.
        gradient_calls: the calls that made them.
        inputs: tensors that are given anew for every step; the axis along which each is split between replicas,
            None where every replica gets the whole.
        outputs: tensors that the step returns.
        targets: nodes that run without being returned.
        spec_of: static shape and dtype of a tensor of the captured graph.
        joins: what the replicas made and has to be combined; empty until the step is replicated.
        stages: what runs once, as it was when the step was replicated; those nodes keep their names.
        joined_gradients: the tensors that what runs once reads in place of the replicas' gradients.
        owners: the worker that holds a variable (or a shard), by its name; every worker holds the others.
        cuts: how variables are cut, by the captured variable's name; `variables` has their shards in their place.
        flows: how the captured tensors depend on the batch, where a kernel has changed the graph since in ways that
            propagation does not follow.
        initializers: nodes that this worker runs once, before the first step that has them: what kernels keep between
            steps (the residual of a compressor, say) gets its first value. By a key that is the same in all programs
            that share the state, so that a second program does not set it again.
        keepers: for each variable that is owned, how its owner keeps it; there once the step is replicated.
        served: nodes that the owner of stale variables runs once for every step, beside it.
        landed: nodes that end, run between two steps, once all is written that this worker's steps have asked for.
        copies: suffixes of a variable's name in the session under which every worker has copies of it.
        jit_compile: whether the script asks XLA to compile all of the step. Where it asks for parts, the names of their
            nodes say so (`autodist.graph.jit_scope`).
        replicated: captured nodes of which each replica has a copy of its own, once the step is replicated.
        wiring: how the nodes of `graph_def` hang together; `replace` hands it on for as long as the graph is the same.
    """

    graph_def: tf.compat.v1.GraphDef
    variables: tuple[Variable, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    gradient_calls: tuple[GradientCall, ...] = ()
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    spec_of: Callable[[str], tf.TensorSpec] = field(default=_no_specs, compare=False, repr=False)
    joins: tuple[Join, ...] = ()
    stages: Stages | None = None
    joined_gradients: frozenset[str] = frozenset()
    owners: Mapping[str, int] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    flows: Propagation | None = None
    initializers: Mapping[str, str] = field(default_factory=dict)
    keepers: Mapping[str, Keeper] = field(default_factory=dict)
    served: tuple[str, ...] = ()
    landed: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    jit_compile: bool = False
    replicated: frozenset[str] = frozenset()
    wiring: Wiring = field(default=_UNREAD, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.wiring.graph_def is not self.graph_def:
            object.__setattr__(self, "wiring", Wiring(self.graph_def))

    def with_graph(self, graph_def: tf.compat.v1.GraphDef) -> GraphItem:
        """The same step with another graph; the original is left unchanged."""
        return replace(self, graph_def=graph_def)

    def placement(self, variable: str) -> Placement:
        """Where the value of a captured variable lies, once owners are assigned."""
        cut = self.cuts.get(variable)
        names = [variable] if cut is None else [shard_name(variable, k) for k in range(len(cut.sizes))]
        owners = tuple(self.owners.get(name, EVERY_WORKER) for name in names)
        return Placement(cut, owners, tuple(tuple(sorted(self.copies.get(name, ()))) for name in names))

    @cached_property
    def named(self) -> frozenset[str]:
        """The nodes that the item names: a rewrite keeps them, and all that they need."""
        gradients = [t for gradient in self.gradients for t in gradient.tensors]
        calls = [name for call in self.gradient_calls for name in (call.seed, *call.targets)]
        tensors = [*self.outputs, *self.inputs, *gradients, *calls]
        nodes = [*self.targets, *self.initializers.values(), *(v.handle for v in self.variables)]
        return frozenset([*map(node_of, tensors), *nodes])

    @cached_property
    def by_name(self) -> dict[str, Variable]:
        return {v.name: v for v in self.variables}

    @cached_property
    def by_handle(self) -> dict[str, Variable]:
        """The variable for the name of each VarHandleOp."""
        return {v.handle: v for v in self.variables}


def place_variables(item: GraphItem, placements: Mapping[str, Placement]) -> GraphItem:
    """The item with what is known of where its variables lie, by the captured variables' names."""
    owners: dict[str, int] = {}
    cuts = {name: placement.cut for name, placement in placements.items() if placement.cut is not None}
    for name, placement in placements.items():
        names = [name] if placement.cut is None else [shard_name(name, k) for k in range(len(placement.owners))]
        owners.update(zip(names, placement.owners, strict=True))
    return replace(item, owners=owners, cuts=cuts)
