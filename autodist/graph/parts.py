"""What a captured step is made of besides its graph: variables, gradients, and what is joined between replicas."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf


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
        is_overwritten: whether what Keras has for its gradient is its new value, so that it is state, and not trained.
        stage: the pipeline stage to which the script gives it; None: it does not say.
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
    """How the rows of a sparse gradient that replicas make become those that one device makes of the whole batch."""

    IN_TURN = "in turn"  # each belongs to examples: they stand one after the other, also where indices repeat
    ALIGNED = "aligned"  # all replicas have the same indices: rows of one position are added
    BY_INDEX = "by index"  # no index comes twice: rows of one index are added
    ENDS_ALIGNED = "ends aligned"  # the last rows, as many on all replicas, as ALIGNED; those before them IN_TURN


@dataclass(frozen=True)
class VariableGradient:
    """The gradient of one variable, before clipping or any arithmetic of an optimizer.

    No tensor belongs to two gradients: capture gives each variable its own where the maths gives both the same.

    Attributes:
        variable: name of the variable.
        tensors: ("values:0",) if dense, ("indices:0", "values:0") if sparse.
        call: index into Step.gradient_calls.
        row_join: how it is joined, if it is sparse.
        aligned: how many rows are aligned, if only the last ones are.
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
    """A value that a loss is made of, with a weight of its own.

    What was differentiated is not the loss, but what the same arithmetic makes of `value`s.

    Attributes:
        tensor: as the script made it.
        seed: node that holds the weight, a PlaceholderWithDefault of 1: gradients through this value are proportional
            to it.
        value: node that holds what the loss is computed from, a PlaceholderWithDefault of `tensor` times the seed.
        parts: positions, among the call's terms, of those of which this one is made by arithmetic; none if it is not
            known to be.
    """

    tensor: str
    seed: str
    value: str
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class GradientCall:
    """One call of `gradient`: what was differentiated and by which weight the result is multiplied.

    Attributes:
        targets: the tensors that were differentiated, the loss mostly.
        seed: node that holds the weight, a PlaceholderWithDefault of 1; the gradients are proportional to it.
        terms: the values at which the targets can be taken apart, parts before what they are parts of; none where all
            that was differentiated has one weight, the seed's.
        is_settled: whether `terms` are those that each have a weight of their own, and no others.
    """

    targets: tuple[str, ...]
    seed: str
    terms: tuple[Term, ...] = ()
    is_settled: bool = False


@dataclass(frozen=True)
class EvenParts:
    """That a step takes batches alone of which its replicas get equally many examples.

    Attributes:
        target: of which it is not known how it depends on the batch.
        reason: why, in words that a user can read.
        replicas: of all workers.
        here: of this worker.
        is_own: whether the step waits for no other worker, so that the parts of this one alone have to be equal.
        line: where the script has made the target, as "train.py:12"; None where that is not known.
    """

    target: str
    reason: str
    replicas: int
    here: int
    is_own: bool = False
    line: str | None = field(default=None, repr=False)


class PendingReductionKind(enum.Enum):
    """What a join is for; joins of different kinds never share a bucket."""

    GRADIENT = "gradient"
    LOSS = "loss"  # what replicas have to know of each other before they differentiate a loss; each has a bucket alone
    WHOLE = "whole"  # what replicas have to know of each other to compute on; those of one depth may share a bucket
    BOUNDARY = "boundary"  # what an update asks of the compute part besides gradients
    STATE = "state"  # what the compute part writes, and outputs


class ReduceOp(enum.Enum):
    """How the values of several parts are merged into one."""

    ADD = "add"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"
    ROWS = "rows"  # the rows of one part after those of another, as many as each has


@dataclass(frozen=True)
class PendingReduction:
    """A tensor that is summed, or merged in another way, over all replicas of all workers.

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
        aligned: how many rows are aligned, if only the last ones are.
        merge: by what the workers' parts become one; all but sums are dense and have no weight.
        axis: along which rows follow one another, if parts become one so.
        depth: how many joins of its level stand one behind the other before it, each made of what the last one gave.
    """

    name: str
    kind: PendingReductionKind
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
    aligned: int = 0
    merge: ReduceOp = ReduceOp.ADD
    axis: int = 0
    depth: int = 0

    @property
    def is_sparse(self) -> bool:
        return len(self.local) == 2
