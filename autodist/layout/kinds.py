"""Kinds: the layouts that propagation returns, and the weights of a weighted mean over the replicas."""

from __future__ import annotations

from dataclasses import dataclass, field

from autodist.graph.ops import ReducedBy


@dataclass(frozen=True)
class Examples:
    """The number of examples in the replica's shard of the batch, or anything proportional to it."""


@dataclass(frozen=True)
class Elements:
    """The number of elements of a graph tensor with a data-dependent number of rows, such as a boolean mask's result.

    Attributes:
        tensor: its name ("boolean_mask/GatherV2:0").
    """

    tensor: str


@dataclass(frozen=True)
class Scalar:
    """The value of a scalar graph tensor, such as the sum of a mask or of sample weights.

    Attributes:
        tensor: its name ("Sum_1:0").
    """

    tensor: str


@dataclass(frozen=True)
class Total:
    """The value of a scalar graph tensor times another weight: `reduce_mean(mask)` times the number of examples.

    Attributes:
        tensor: name of the scalar, which is itself a mean.
        weight: the weight of that mean.
    """

    tensor: str
    weight: Weight


Weight = Examples | Elements | Scalar | Total


@dataclass(frozen=True)
class Replicated:
    """Equal on all replicas: constants, reads of variables, scalar feeds, and anything computed from these alone.

    Attributes:
        is_generator: True for the state of a random generator, which changes when a replica draws from it. Only
            declared kinds set it; `propagate` never returns it.
    """

    is_generator: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True)
class PerExample:
    """Sharded along `axis`: rows belong to examples, in order. Concatenating the replicas' values gives the whole.

    Attributes:
        axis: counted from 0. An example may have several rows, as in a flattened [batch, time].
        mixed_at: the node at which examples of a shard interact (batch normalisation), or may interact because it
            follows an op that has no rule. The whole is then the value that one device computes from the same shards
            one after another. None if the value is exact.
    """

    axis: int
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Sum:
    """A partial sum: adding the replicas' values gives the whole.

    Attributes:
        mixed_at: as in `PerExample`.
    """

    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Mean:
    """A weighted mean: the whole is Σ w·v / Σ w over the replicas, elementwise.

    Attributes:
        weight: w, up to a factor common to all replicas. If it is zero (a fully masked shard), ignore the replica's
            value, which may be 0 or NaN.
        mixed_at: as in `PerExample`.
    """

    weight: Weight
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unknown:
    """The replicas' values cannot be combined, or propagation cannot determine how.

    Attributes:
        reason: a message for the user that names the node and the op at fault.
    """

    reason: str


@dataclass(frozen=True)
class BatchShaped(Unknown):
    """An op that combines it with rows takes its rows for those of the same examples."""


@dataclass(frozen=True)
class Lengths(Unknown):
    """A shape that holds the size of the batch: it gives the tensors that have it a row for each example."""


@dataclass(frozen=True)
class ByPosition(Unknown):
    """Rows of the batch selected by constant positions, which differ from shard to shard.

    Attributes:
        whole_up_to: the largest batch size for which the selection contains all rows; None if there is no such size.
    """

    whole_up_to: int | None = None


@dataclass(frozen=True)
class Reduced(Unknown):
    """The same elementwise reduction of the replicas' values gives the whole.

    Code that expects sums treats it as unknown.

    Attributes:
        by: the reduction, neither SUM nor MEAN. For booleans, MAX is `any` and MIN is `all`.
        mixed_at: as in `PerExample`.
    """

    by: ReducedBy
    mixed_at: str | None = field(default=None, compare=False)


Kind = Replicated | PerExample | Sum | Mean | Reduced | Unknown

Joined = Mean | Sum | Reduced
"""Kinds without a batch axis for which one reduction over the replicas gives the value for the whole batch."""
