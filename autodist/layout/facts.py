"""Facts: the internal layouts of propagation.

They are finer than kinds, the layouts that propagation returns: a fact also records that a quotient of two sums is a
mean.

A *form* describes a replica's value as base × Π factorᵉ. Each factor is a scalar summed over the replicas (the number
of examples, the sum of a mask). The base is replicated, sharded into rows, or itself a partial sum. The value for the
whole batch is the combined base times the combined factors. Products and quotients of sums thus stay exact: `sum(values
· mask · (total / valid)) / total` is a sum over `valid`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from autodist.graph.ops import ReducedBy
from autodist.layout.factors import EXAMPLES, NONE, Count, Factors, PartialSum
from autodist.layout.kinds import Elements


class Base(enum.Enum):
    """Bases that have no batch axis."""

    REPLICATED = "the same on all replicas"
    PARTIAL_SUM = "a sum over the replica's examples, not a scalar"


@dataclass(frozen=True)
class Sharded:
    """A base with a batch axis: its slices along `axis` belong to examples.

    Attributes:
        axis: counted from 0.
        count: the number of rows, up to a constant common to all replicas.
        per: rows per example, if known.
        order: empty while rows are in the order of the examples; else their arrangement. Rows of two tensors match only
            if their orders are equal. The order of concatenated rows lists their parts, as rows of a first axis.
    """

    axis: int
    count: Count = EXAMPLES
    per: Fraction | None = Fraction(1)
    order: tuple[object, ...] = ()

    @property
    def whole_per(self) -> int | None:
        """The number of rows per example, in the order of the examples; None if unknown or fractional."""
        if self.order or self.count != EXAMPLES or self.per is None or self.per.denominator != 1:
            return None
        return int(self.per)


@dataclass(frozen=True)
class Reordered:
    """An order of rows after a permutation of the examples within their shard.

    Attributes:
        key: equal for equal permutations.
        before: the order before the permutation.
        node: the node that permuted them.
    """

    key: object
    before: tuple[object, ...]
    node: str = field(compare=False)


@dataclass(frozen=True)
class Form:
    """A value base × Π factorᵉ; see the module docstring."""

    base: Base | Sharded = Base.REPLICATED
    factors: Factors = NONE
    mixed_at: str | None = field(default=None, compare=False)

    @property
    def rows(self) -> Sharded | None:
        return self.base if isinstance(self.base, Sharded) else None

    @property
    def is_replicated(self) -> bool:
        return self.base is Base.REPLICATED and not self.factors

    @property
    def degree(self) -> int:
        """The power by which the value grows with the batch size: 0 for means, 1 for sums."""
        return sum(exponent for _, exponent in self.factors) + (self.base is Base.PARTIAL_SUM)


@dataclass(frozen=True)
class Dims:
    """Integers computed from shapes: a vector, or one element of it if `is_scalar`.

    Attributes:
        forms: the form of each element; the batch dimension is a count.
        values: the static value of each element, or None.
    """

    forms: tuple[Form, ...]
    values: tuple[int | None, ...]
    is_scalar: bool = False

    @property
    def is_replicated(self) -> bool:
        """True if all elements are replicated."""
        return all(form.is_replicated for form in self.forms)


@dataclass(frozen=True)
class Extremum:
    """A value without a batch axis: a maximum, minimum, product or norm of the shard. Most rules treat it as unknown.

    Attributes:
        by: the reduction.
        reason: the message for rules that need a sum or a mean.
        mixed_at: as in `Form`.
    """

    by: ReducedBy
    reason: str
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Statistic:
    """A value without a batch axis: a function of means over the shard that is not a mean, such as a variance."""

    reason: str


class Recovery(enum.Enum):
    """The cases in which a rule may combine an unknown value with rows and still return rows."""

    NEVER = "never: it may depend on other examples"
    BATCH_SHAPED = "if it has the batch axis, too"
    ALWAYS = "always: each replica draws it independently"


@dataclass(frozen=True)
class UnknownFact:
    """An unknown layout, with the reason."""

    reason: str
    recovery: Recovery = Recovery.NEVER


@dataclass(frozen=True)
class SelectedByPosition(UnknownFact):
    """Rows of the batch selected by constant positions.

    Attributes:
        whole_up_to: the largest batch size for which all rows are selected; None if there is no such size.
    """

    whole_up_to: int | None = None


@dataclass(frozen=True)
class GeneratorState:
    """The state of a random generator, or a value derived from it: replicated until a replica draws from it."""


@dataclass(frozen=True)
class ListOf:
    """A TensorList whose elements share one layout; None while it is empty."""

    element: Fact | None


@dataclass(frozen=True)
class Positions:
    """Ascending row indices: the rows selected by a mask, or the row of each entry of a sparse tensor.

    Attributes:
        within: the indexed rows.
        entries: the layout of the indices themselves, and of the values that they belong to.
        covers: True if every row occurs.
    """

    within: Sharded
    entries: Sharded
    covers: bool = False


@dataclass(frozen=True)
class Coordinates:
    """The indices of a sparse tensor, as a matrix: its first column is `Positions`, the other columns are rows.

    Attributes:
        positions: the first column.
    """

    positions: Positions


@dataclass(frozen=True)
class RowIndices:
    """Rows whose elements are row indices of the shard: `Positions` along any axis.

    Attributes:
        within: the indexed rows.
        rows: the layout of the elements.
        covers: True if every row occurs.
    """

    within: Sharded
    rows: Form
    covers: bool = False


@dataclass(frozen=True)
class Columnwise:
    """Positions or coordinates, column after column: a flat vector, or a matrix with a row for each column.

    Attributes:
        columns: the layout after transposition.
        number: the number of columns.
    """

    columns: Positions | Coordinates
    number: int


@dataclass(frozen=True)
class Permutation:
    """A shard-specific permutation of row indices; gathering by it pairs examples of the shard.

    Attributes:
        within: the indexed rows.
        key: identifies the permutation.
        node: the node that produced it.
    """

    within: Sharded
    key: str
    node: str


@dataclass(frozen=True)
class RowsWithTail:
    """Rows of examples followed, along the same axis, by rows of no example: true classes, then sampled ones.

    Attributes:
        first: the rows of examples.
        rest: the rows after them: replicated, or noise.
        length: the static length of the first part, or None.
    """

    first: Form
    rest: Form | UnknownFact
    length: int | None


@dataclass(frozen=True)
class DistinctRows:
    """One row for each distinct id in a shard; gathering by the matching `DistinctIndices` returns rows of examples.

    Attributes:
        of: the name of the tensor that indexes the distinct ids.
    """

    of: str


@dataclass(frozen=True)
class DistinctIndices:
    """For rows of ids, the index of each id among the distinct ones.

    Attributes:
        of: the name of the index tensor.
        rows: the rows of the ids.
    """

    of: str
    rows: Form


class Role(enum.Enum):
    """The role of a value in a loop that has one iteration per example."""

    INDEX = "the number of the iteration"
    NEXT_INDEX = "the number of the next iteration"
    COUNT = "the number of examples"
    CONDITION = "the condition for another iteration"
    EXAMPLE = "a value of the iteration's example"


@dataclass(frozen=True)
class LoopValue:
    """A value in a loop with one iteration per example, or an element of a list with one element per example.

    Attributes:
        role: its role.
        within: the rows that the loop iterates over.
        mixed_at: as in `Form`.
    """

    role: Role
    within: Sharded
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unvisited:
    """The value of a TF1 loop variable before its first iteration has been analysed."""


_OfRows = (
    Positions
    | Coordinates
    | RowIndices
    | Columnwise
    | Permutation
    | RowsWithTail
    | DistinctRows
    | DistinctIndices
    | LoopValue
)
Fact = Form | Dims | Extremum | Statistic | UnknownFact | GeneratorState | ListOf | _OfRows | Unvisited

_NO_FORM: dict[type, str] = {
    ListOf: "it is a list of tensors",
    Unvisited: "it is in a loop that has no iteration",
    **dict.fromkeys(
        [Positions, Coordinates, RowIndices, Columnwise, Permutation],
        "it holds positions of rows, which each replica counts within its shard of the batch",
    ),
    RowsWithTail: "it holds rows of examples followed by a part that belongs to no example",
    LoopValue: "it depends on the single example of a loop iteration",
    DistinctRows: (
        "it has one row for each distinct id in a shard of the batch, and other shards may contain the same ids"
    ),
    DistinctIndices: "it numbers the distinct ids in a shard of the batch, and each replica numbers them independently",
}

REPLICATED = Form()


def elements_of(tensor: str) -> Sharded:
    """Returns rows counted by the first axis of a tensor with a data-dependent length."""
    return Sharded(0, Count(Elements(tensor)))


def rows(axis: int) -> Form:
    """Returns the form with one row per example along this axis."""
    return Form(Sharded(axis))


def names_a_sum(fact: Fact) -> bool:
    """Returns True if a factor refers to a tensor's value, which in a loop changes with each iteration."""
    return isinstance(fact, Form) and any(isinstance(factor, PartialSum) for factor, _ in fact.factors)


def with_axis(form: Form, axis: int, **changes: object) -> Form:
    """Returns a form with its rows moved to another axis; a form without rows is returned unchanged."""
    if form.rows is None:
        return form
    return replace(form, base=replace(form.rows, axis=axis, **changes))  # type: ignore[arg-type]


def reordered(form: Form, key: object, node: str) -> Form:
    """Returns rows after a permutation of the examples within their shard; equal keys mean equal permutations."""
    if form.rows is None:
        return form
    return replace(form, base=replace(form.rows, order=(Reordered(key, form.rows.order, node),)))


_HOLDS_A_BATCH = "it is a shape that holds the size of the batch"
WITHOUT_A_NODE = frozenset([*_NO_FORM.values(), _HOLDS_A_BATCH])
"""Reasons that do not name a node."""


def form_of(fact: Fact) -> Form | Statistic | UnknownFact:
    """Converts a fact to a form, a statistic or an unknown fact."""
    if isinstance(fact, Dims):
        if fact.is_scalar or len(fact.forms) == 1:
            return fact.forms[0]
        if fact.is_replicated:
            return REPLICATED
        return UnknownFact(_HOLDS_A_BATCH)
    if isinstance(fact, Form | Statistic | UnknownFact):
        return fact
    if isinstance(fact, GeneratorState):
        return REPLICATED
    return UnknownFact(fact.reason if isinstance(fact, Extremum) else _NO_FORM[type(fact)])


def is_noise(fact: Fact) -> bool:
    """Returns True if each replica draws the value independently, once for all its examples."""
    return isinstance(fact, UnknownFact) and fact.recovery is Recovery.ALWAYS


def common_noise(facts: Sequence[Fact]) -> Fact | None:
    """Returns the noise among facts that are all noise or replicated; None if there is none."""
    if not all(is_noise(fact) or fact == REPLICATED for fact in facts):
        return None
    return next((fact for fact in facts if is_noise(fact)), None)


def common_generator_state(facts: Sequence[Fact]) -> GeneratorState | None:
    """Returns the generator state among facts that are all generator states or replicated; None if there is none."""
    if not all(isinstance(fact, GeneratorState) or fact == REPLICATED for fact in facts):
        return None
    return next((fact for fact in facts if isinstance(fact, GeneratorState)), None)


def rows_of(fact: Fact) -> Fact:
    """Returns the fact of a tensor with as many rows, whatever the rows contain."""
    match fact:
        case Positions():
            return Form(fact.entries)
        case Coordinates():
            return Form(fact.positions.entries)
        case DistinctIndices() | RowIndices():
            return fact.rows
        case Permutation():
            return Form(fact.within)
    return fact


def mixed_within(fact: Fact) -> str | None:
    """Returns the node at which examples interact in a value, or in the elements of a list; None if there is none."""
    return mixed_within(fact.element) if isinstance(fact, ListOf) and fact.element else getattr(fact, "mixed_at", None)
