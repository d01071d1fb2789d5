"""What is known of a tensor while propagation runs: finer than a kind, since a quotient of two sums may be a mean.

A *form* says that the value on a replica is base × Π factorᵉ, where each factor is a scalar that adds up over the
replicas (the number of examples, the sum of a mask), and the base is the same everywhere, made of rows, or itself
additive. The whole batch's value is the joined base times the joined factors, so that products and quotients of
sums stay exact: `sum(values · mask · (total / valid)) / total` is a sum over `valid`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from autodist.graph.propagation.factors import EXAMPLES, NONE, Count, Factors, PartialSum
from autodist.graph.propagation.kinds import Elements, ReducedBy


class Base(enum.Enum):
    """Bases that have no batch axis."""

    SAME = "the same on all replicas"
    ADDED = "a sum over the replica's examples, not a scalar"


@dataclass(frozen=True)
class Rows:
    """A base with a batch axis: its slices along `axis` belong to examples.

    Attributes:
        axis: counted from 0.
        count: how many rows there are, up to what all replicas share.
        per: rows for each example, where that is known.
        order: empty while the rows stand in the order of the examples; else how they are arranged. Values of two
            tensors belong together only where these are equal.
    """

    axis: int
    count: Count = EXAMPLES
    per: Fraction | None = Fraction(1)
    order: tuple[object, ...] = ()

    @property
    def whole_per(self) -> int | None:
        """How many rows each example has, in the order of the examples; None if that is not known or not whole."""
        if self.order or self.count != EXAMPLES or self.per is None or self.per.denominator != 1:
            return None
        return int(self.per)


@dataclass(frozen=True)
class Reordered:
    """An order of rows, as the one thing that tells it: the examples have changed places within their part.

    Attributes:
        key: alike where they have changed places alike.
        before: the order before.
        node: that changed it.
    """

    key: object
    before: tuple[object, ...]
    node: str = field(compare=False)


@dataclass(frozen=True)
class Form:
    """base × Π factorᵉ. See the module's text."""

    base: Base | Rows = Base.SAME
    factors: Factors = NONE
    mixed_at: str | None = field(default=None, compare=False)

    @property
    def rows(self) -> Rows | None:
        return self.base if isinstance(self.base, Rows) else None

    @property
    def is_same(self) -> bool:
        return self.base is Base.SAME and not self.factors

    @property
    def degree(self) -> int:
        """How it grows with the batch: 0 for means, 1 for sums."""
        return sum(exponent for _, exponent in self.factors) + (self.base is Base.ADDED)


@dataclass(frozen=True)
class Dims:
    """Integers that come from shapes; a vector, or one element of it if `is_scalar`.

    Attributes:
        forms: of each element; the batch's is a count.
        values: of each element, where it is known without running anything.
    """

    forms: tuple[Form, ...]
    values: tuple[int | None, ...]
    is_scalar: bool = False

    @property
    def is_same(self) -> bool:
        """Whether all of them are the same on all replicas."""
        return all(form.is_same for form in self.forms)


@dataclass(frozen=True)
class Extremum:
    """No batch axis; the largest of the part's values, or the like. To rules that do not know it, it is opaque.

    Attributes:
        by: the reduction.
        reason: why it is neither a sum nor a mean.
        mixed_at: as of a form.
    """

    by: ReducedBy
    reason: str
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Statistic:
    """No batch axis; a function of means over the part that is no mean itself (a variance)."""

    reason: str


class Recovery(enum.Enum):
    """When an opaque value may be combined with rows to give rows again."""

    NEVER = "it may hold what belongs to other examples"
    BATCH_SHAPED = "where it has the batch axis too"
    ALWAYS = "it is noise, drawn by each replica for itself"


@dataclass(frozen=True)
class UnknownFact:
    """Nothing is known, for this reason."""

    reason: str
    recovery: Recovery = Recovery.NEVER


@dataclass(frozen=True)
class Chosen(UnknownFact):
    """Rows of the batch that constants name by their position in it.

    Attributes:
        whole_up_to: the largest number of examples of which these rows are all; None: of no number.
    """

    whole_up_to: int | None = None


@dataclass(frozen=True)
class GeneratorState:
    """A random generator's state, or what is made of it: stored alike, and another one where a replica draws by it."""


@dataclass(frozen=True)
class ListOf:
    """A TensorList whose elements are all alike; None while it is empty."""

    element: Fact | None


@dataclass(frozen=True)
class Positions:
    """Numbers of rows, ascending: where a mask over rows holds, or whose each entry of a sparse tensor is.

    Attributes:
        within: the rows that are numbered.
        entries: what the numbers themselves are rows of, or whatever each of them stands for.
        covers: whether every row's number is among them.
    """

    within: Rows
    entries: Rows
    covers: bool = False


@dataclass(frozen=True)
class Coordinates:
    """Where the entries of a sparse tensor stand, as a matrix: its first column is `Positions`, others are rows.

    Attributes:
        positions: the first column.
    """

    positions: Positions


@dataclass(frozen=True)
class Numbered:
    """Rows of which each element is the number of a row of the part: `Positions` that lie along any axis.

    Attributes:
        within: the rows that are numbered.
        rows: how the elements lie.
        covers: whether every row's number is among them.
    """

    within: Rows
    rows: Form
    covers: bool = False


@dataclass(frozen=True)
class ByColumn:
    """Numbers or coordinates with one column behind the other: as a vector, or as a matrix with a row for each column.

    Attributes:
        columns: what they are once the columns stand side by side.
        number: of columns.
    """

    columns: Positions | Coordinates
    number: int


@dataclass(frozen=True)
class Shuffled:
    """The numbers of all rows of a part, in an order of the part's own: what is taken by them pairs its examples.

    Attributes:
        within: the rows that are numbered.
        key: tells orders apart.
        node: that put them in this order.
    """

    within: Rows
    key: str
    node: str


@dataclass(frozen=True)
class Followed:
    """Rows of examples and, behind them along the same axis, what belongs to none: true classes, then sampled ones.

    Attributes:
        first: the rows.
        rest: what stands behind them: the same on all replicas, or noise.
        length: of the first part, where it is known without running anything.
    """

    first: Form
    rest: Form | UnknownFact
    length: int | None


@dataclass(frozen=True)
class Distinct:
    """One row for each different id among the ids of a replica's part; what `Numbers` of them take are rows again.

    Attributes:
        of: the numbers of the ids, by name.
    """

    of: str


@dataclass(frozen=True)
class Numbers:
    """For rows of ids, where each id stands among the different ones.

    Attributes:
        of: their name.
        rows: the rows of the ids.
    """

    of: str
    rows: Form


class Role(enum.Enum):
    """What a value is in a loop that has a turn for each example."""

    TURN = "the number of the turn"
    NEXT = "the number of the turn after it"
    BOUND = "the number of examples"
    GOES_ON = "whether there is another turn"
    EXAMPLE = "what belongs to the turn's example"


@dataclass(frozen=True)
class InTurn:
    """A value in a loop that has a turn for each example; in a list that is as long as the batch: one element.

    Attributes:
        role: what it is.
        within: the rows that the turns are for.
        mixed_at: as of a form.
    """

    role: Role
    within: Rows
    mixed_at: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Nothing:
    """What an old loop brings back before its first turn has been followed."""


_OfRows = Positions | Coordinates | Numbered | ByColumn | Shuffled | Followed | Distinct | Numbers | InTurn
Fact = Form | Dims | Extremum | Statistic | UnknownFact | GeneratorState | ListOf | _OfRows | Nothing

_NO_FORM: dict[type, str] = {
    ListOf: "it is a list of tensors",
    Nothing: "it stands in a loop that has no turn",
    **dict.fromkeys(
        [Positions, Coordinates, Numbered, ByColumn, Shuffled],
        "it holds positions of rows, which each replica counts for its own part of the batch",
    ),
    Followed: "it holds rows of examples and, behind them, what belongs to no example",
    InTurn: "it depends on the one example that a turn of a loop is for",
    Distinct: "it has a row for each different id of a part of the batch, whose ids other parts may have too",
    Numbers: "it numbers the different ids of a part of the batch, which each replica does for itself",
}

SAME = Form()


def elements_of(tensor: str) -> Rows:
    """As many rows as a tensor, whose length depends on the data, has along its first axis."""
    return Rows(0, Count(Elements(tensor)))


def rows(axis: int) -> Form:
    """One row an example, along this axis."""
    return Form(Rows(axis))


def names_a_sum(fact: Fact) -> bool:
    """Whether a factor of this is the value of a certain tensor, which in a loop is another one at each turn."""
    return isinstance(fact, Form) and any(isinstance(factor, PartialSum) for factor, _ in fact.factors)


def with_axis(form: Form, axis: int, **changes: object) -> Form:
    """The same rows along another axis; forms without rows stay as they are."""
    if form.rows is None:
        return form
    return replace(form, base=replace(form.rows, axis=axis, **changes))  # type: ignore[arg-type]


def reordered(form: Form, key: object, node: str) -> Form:
    """Rows whose examples have changed places within their part; equal keys stand for the same change."""
    if form.rows is None:
        return form
    return replace(form, base=replace(form.rows, order=(Reordered(key, form.rows.order, node),)))


_HOLDS_A_BATCH = "it is a shape that holds the size of the batch"
WITHOUT_A_NODE = frozenset([*_NO_FORM.values(), _HOLDS_A_BATCH])
"""Reasons that do not say at which node something is not known."""


def form_of(fact: Fact) -> Form | Statistic | UnknownFact:
    """A fact without what only shapes and lists need."""
    if isinstance(fact, Dims):
        if fact.is_scalar or len(fact.forms) == 1:
            return fact.forms[0]
        if fact.is_same:
            return SAME
        return UnknownFact(_HOLDS_A_BATCH)
    if isinstance(fact, Form | Statistic | UnknownFact):
        return fact
    if isinstance(fact, GeneratorState):
        return SAME
    return UnknownFact(fact.reason if isinstance(fact, Extremum) else _NO_FORM[type(fact)])


def is_noise(fact: Fact) -> bool:
    """Whether each replica draws it for itself, all its examples alike."""
    return isinstance(fact, UnknownFact) and fact.recovery is Recovery.ALWAYS


def made_of_noise(facts: Sequence[Fact]) -> Fact | None:
    """The noise, where there is some and nothing beside it but what is the same on all replicas."""
    if not all(is_noise(fact) or fact == SAME for fact in facts):
        return None
    return next((fact for fact in facts if is_noise(fact)), None)


def made_of_state(facts: Sequence[Fact]) -> GeneratorState | None:
    """A generator's state, where there is one and nothing beside it but what is the same on all replicas."""
    if not all(isinstance(fact, GeneratorState) or fact == SAME for fact in facts):
        return None
    return next((fact for fact in facts if isinstance(fact, GeneratorState)), None)


def rows_of(fact: Fact) -> Fact:
    """A fact as that of a tensor with as many rows; what is counted in these is not asked."""
    match fact:
        case Positions():
            return Form(fact.entries)
        case Coordinates():
            return Form(fact.positions.entries)
        case Numbers() | Numbered():
            return fact.rows
        case Shuffled():
            return Form(fact.within)
    return fact
