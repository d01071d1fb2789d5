"""Parts of a captured step besides its graph: variables, gradients, and reductions between replicas."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from autodist.placement.group import Group


class Aggregation(enum.Enum):
    """The script's declaration for writes of the compute part to a variable."""

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
        is_seed: True for the state of a random generator, which must differ between replicas.
        is_overwritten: True if Keras's "gradient" of it is its new value: the variable is state and is not trained.
        stage: the pipeline stage that the script assigns; None: none.
    """

    name: str
    handle: str
    shape: tuple[int, ...]
    dtype: tf.DType
    trainable: bool
    aggregation: Aggregation = Aggregation.NONE
    is_seed: bool = False
    is_overwritten: bool = False
    stage: int | None = None

    @property
    def byte_size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size


class RowJoin(enum.Enum):
    """Rule that combines the sparse-gradient rows of replicas into those that one device computes."""

    IN_TURN = "in turn"  # rows belong to examples: concatenated, even where indices repeat
    ALIGNED = "aligned"  # all replicas have the same indices: rows of one position are added
    BY_INDEX = "by index"  # no index occurs twice: rows of one index are added
    ENDS_ALIGNED = "ends aligned"  # the last rows, equally many on all replicas, as ALIGNED; those before them IN_TURN


@dataclass(frozen=True)
class VariableGradient:
    """The gradient of one variable, before clipping and optimizer arithmetic.

    No tensor belongs to two gradients: if the gradients of two variables are equal, capture creates a tensor for each.

    Attributes:
        variable: name of the variable.
        tensors: ("values:0",) if dense, ("indices:0", "values:0") if sparse.
        call: index into Step.gradient_calls.
        row_join: rule that combines the rows, if it is sparse.
        aligned: the number of aligned rows, if only the last ones are.
    """

    variable: str
    tensors: tuple[str, ...]
    call: int
    row_join: RowJoin = RowJoin.IN_TURN
    aligned: int = 0

    @property
    def is_sparse(self) -> bool:
        return len(self.tensors) == 2


@dataclass(frozen=True)
class Term:
    """A value that a loss is computed from, with a scale of its own.

    The differentiated tensor is not the loss, but the result of the same arithmetic on the `value`s.

    Attributes:
        tensor: the script's tensor.
        seed: node that holds the scale, a PlaceholderWithDefault of 1: gradients through this value are proportional to
            it.
        value: node that the loss reads instead of `tensor`, a PlaceholderWithDefault of `tensor` times the seed.
        parts: positions, among the call's terms, of the terms that this one is computed from by arithmetic; empty if
            unknown.
    """

    tensor: str
    seed: str
    value: str
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class GradientCall:
    """One call of `gradient`: the differentiated tensors and the scale that multiplies the result.

    Attributes:
        targets: the differentiated tensors, usually the loss.
        seed: node that holds the scale, a PlaceholderWithDefault of 1; the gradients are proportional to it.
        terms: the points at which the targets decompose, parts before the terms computed from them; empty if all
            differentiated tensors have one scale, that of the seed.
        is_settled: True if `terms` are exactly those with a scale of their own.
    """

    targets: tuple[str, ...]
    seed: str
    terms: tuple[Term, ...] = ()
    is_settled: bool = False

    @property
    def seeds(self) -> tuple[str, ...]:
        """The node of its scale, and those of the scales of its terms."""
        return self.seed, *(term.seed for term in self.terms)


@dataclass(frozen=True)
class EvenSharesRequired:
    """Reason why a step accepts only batches that divide evenly between its replicas.

    Attributes:
        target: the tensor whose dependence on the batch is unknown.
        reason: explanation for the user.
        replicas: number of replicas of all workers.
        here: number of replicas of this worker.
        is_own: True if the step waits for no other worker, so that only the shares within this worker must be equal.
        line: line of the script that created the target, as "train.py:12"; None if it is unknown.
    """

    target: str
    reason: str
    replicas: int
    here: int
    is_own: bool = False
    line: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class PipelinePart:
    """Position of a captured node of the compute part in a pipeline.

    Attributes:
        stage: the pipeline stage that computes it.
        is_backward: True if it depends on the seed of the loss.
        is_held: True if it depends on variables alone and is therefore the same for all micro-batches.
    """

    stage: int
    is_backward: bool = False
    is_held: bool = False


@dataclass(frozen=True)
class OuterStep:
    """Nodes that run between two steps, once every some steps.

    Attributes:
        every: the number of training steps from one run to the next.
        nodes: the nodes that run.
        variables: the names in the session of the variables that they average.
    """

    every: int
    nodes: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


class PendingReductionKind(enum.Enum):
    """Purpose of a pending reduction; reductions of different kinds never share a bucket."""

    GRADIENT = "gradient"
    LOSS = "loss"  # values that replicas exchange before they differentiate a loss; one bucket each
    WHOLE = "whole"  # values that replicas exchange to compute on; those of one depth may share a bucket
    BOUNDARY = "boundary"  # values besides gradients that an update reads from the compute part
    STATE = "state"  # writes of the compute part, and outputs


class ReduceOp(enum.Enum):
    """Operation that merges the values of several replicas or workers into one."""

    ADD = "add"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"
    ROWS = "rows"  # the rows of one part after those of another; parts may have different numbers of rows


@dataclass(frozen=True)
class PendingReduction:
    """A tensor that is summed, or merged in another way, over the replicas of a group.

    Attributes:
        name: the same on all workers.
        kind: its purpose.
        local: this worker's contribution: ("sum:0",) if dense, ("indices:0", "values:0") if it is rows.
        result: the tensors that consumers read; if there are other workers, a synchronizer replaces it.
        weight: this worker's contribution to the weight that divides the total; None: a sum.
        level: update round, from 1.
        dtype: of the values.
        shape: of the values; the first axis of rows is unknown.
        group: the places whose contributions are merged, in rank order.
        variable: the variable of a gradient.
        index_dtype: of the indices, if it is rows.
        weight_dtype: of the weight, if there is one.
        row_join: rule that combines rows, if it is rows.
        aligned: the number of aligned rows, if only the last ones are.
        merge: operation that merges the workers' contributions; all but sums are dense and have no weight.
        axis: the axis along which contributions are concatenated, for ROWS.
        depth: communication round within its level: the number of reductions that it depends on one after another.
        outer: key of the outer step that it belongs to (`Step.outer_steps`); "": it is part of each step.
    """

    name: str
    kind: PendingReductionKind
    local: tuple[str, ...]
    result: tuple[str, ...]
    weight: str | None
    level: int
    dtype: tf.DType
    shape: tf.TensorShape
    group: Group
    variable: str | None = None
    index_dtype: tf.DType | None = None
    weight_dtype: tf.DType | None = None
    row_join: RowJoin = RowJoin.IN_TURN
    aligned: int = 0
    merge: ReduceOp = ReduceOp.ADD
    axis: int = 0
    depth: int = 0
    outer: str = ""

    @property
    def is_sparse(self) -> bool:
        return len(self.local) == 2
