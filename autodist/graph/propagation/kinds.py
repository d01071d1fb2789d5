"""What a tensor is to the replicas: the answers of propagation, and the weights that a mean is joined with."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Examples:
    """The number of examples in the replica's part, or anything proportional to it."""


@dataclass(frozen=True)
class Elements:
    """The number of elements of a tensor of the graph whose number of rows depends on the data (a boolean mask).

    Attributes:
        tensor: its name ("boolean_mask/GatherV2:0").
    """

    tensor: str


@dataclass(frozen=True)
class Scalar:
    """The value of a scalar tensor of the graph: the sum of a mask or of sample weights.

    Attributes:
        tensor: its name ("Sum_1:0").
    """

    tensor: str


@dataclass(frozen=True)
class Total:
    """The value of a scalar tensor of the graph times another weight: `reduce_mean(mask)` times the examples.

    Attributes:
        tensor: name of the scalar, which is itself a mean.
        weight: what that mean is joined with.
    """

    tensor: str
    weight: Weight


Weight = Examples | Elements | Scalar | Total


@dataclass(frozen=True)
class Replicated:
    """The same on all replicas: constants, reads of variables, scalar feeds, and what is computed from them alone.

    Attributes:
        is_generator: whether it is a random generator's state, which is another one where a replica draws by it. It is
            for what is declared, and not told of what is found.
    """

    is_generator: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True)
class PerExample:
    """Rows along `axis` belong to examples, in their order: concatenation joins.

    Attributes:
        axis: counted from 0. There may be several rows for each example (a flattened [batch, time]).
        mixed_at: the node where examples of one part see one another (batch normalisation), or may do so, since an
            op stands before it that the table does not know. The whole is then what one device makes of the same
            parts, one after the other. None where it is exact.
    """

    axis: int
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Sum:
    """Adding the replicas' values joins.

    Attributes:
        mixed_at: as in `PerExample`.
    """

    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Mean:
    """An average with weights joins: the whole is Σ w·v / Σ w over the replicas, element by element.

    Attributes:
        weight: w, known up to a factor that all replicas share. Where it is zero (a part that is all masked) the
            replica's value, which may be 0 or NaN, is to be left out.
        mixed_at: as in `PerExample`.
    """

    weight: Weight
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unknown:
    """The replicas' values cannot be joined, or it is not known how.

    Attributes:
        reason: names the node and the op that stopped it, in words that a user can read.
    """

    reason: str


@dataclass(frozen=True)
class ByPosition(Unknown):
    """Rows of the batch that constants name by their position, which are others in each replica's part.

    Attributes:
        whole_up_to: the largest number of examples of which these rows are all; None: of no number.
    """

    whole_up_to: int | None = None


class ReducedBy(enum.Enum):
    """Reductions over examples that are neither sums nor means."""

    MAX = "the largest value"
    MIN = "the smallest value"
    PRODUCT = "the product"
    NORM = "the root of the sum of squares"


@dataclass(frozen=True)
class Reduced(Unknown):
    """The same reduction of the replicas' values, element by element, joins. To all who add up, it is unknown.

    Attributes:
        by: the reduction; of truth values the largest says whether any holds, the smallest whether all do.
        mixed_at: as in `PerExample`.
    """

    by: ReducedBy
    mixed_at: str | None = field(default=None, compare=False)


Kind = Replicated | PerExample | Sum | Mean | Reduced | Unknown

Joined = Mean | Sum | Reduced
"""Kinds without a batch axis, of whose values on the replicas the whole batch's is made by one reduction."""
