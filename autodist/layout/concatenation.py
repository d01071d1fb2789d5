"""Rules for ops that concatenate, stack, split or unstack tensors along an axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from autodist.graph.ops import factor_rule
from autodist.layout.by_factors import by_factors
from autodist.layout.combine import with_result_axis
from autodist.layout.degree import add_forms
from autodist.layout.entries import with_columns
from autodist.layout.facts import (
    REPLICATED,
    Columnwise,
    Coordinates,
    Dims,
    Fact,
    Form,
    Positions,
    SelectedByPosition,
    Sharded,
    Statistic,
    UnknownFact,
    elements_of,
    form_of,
)
from autodist.layout.lengths import Length, is_same_length, length, plus
from autodist.layout.movement import CONCATENATED
from autodist.layout.op_context import OpContext, Rule
from autodist.layout.sampling import put_behind


def concat(ctx: OpContext) -> Fact | list[Fact]:
    """ConcatV2: the axis is the last input."""
    return _concat(ctx, range(len(ctx.facts) - 1), len(ctx.facts) - 1)


def concat_old(ctx: OpContext) -> Fact | list[Fact]:
    """Concat: the axis is the first input."""
    return _concat(ctx, range(1, len(ctx.facts)), 0)


def _concat(ctx: OpContext, indices: Sequence[int], axis_index: int) -> Fact | list[Fact]:
    if any(isinstance(ctx.facts[index], Dims) for index in indices):
        return _dims_of(ctx, indices)
    axis = ctx.scalar(axis_index)
    special = _concat_special(ctx, indices, axis)
    if special is not None:
        return special
    forms = [form_of(ctx.facts[index]) for index in indices]
    counted = _concat_counts(ctx, forms, axis)
    if counted is not None:
        return counted
    alike = _common_layout(ctx, forms)
    if not isinstance(alike, Form) or alike.rows is None:
        return alike
    rule = factor_rule(ctx)
    if rule is None:
        return ctx.unknown("the axis along which it concatenates tensors is not known")
    if rule.factor(indices[0], alike.rows.axis) is not None:
        return by_factors(ctx)
    return _stacked_rows(ctx, alike, [form.rows for form in forms if isinstance(form, Form) and form.rows])


def _concat_special(ctx: OpContext, indices: Sequence[int], axis: int | None) -> Fact | None:
    """Concatenates columns of sparse indices, or rows followed by rows of no example; None for anything else."""
    if axis in (1, -1) and ctx.rank(indices[0]) == 2:
        return with_columns(ctx, indices)
    if axis in (0, -1) and ctx.rank(indices[0]) == 1 and (result := with_columns(ctx, indices)):
        return Columnwise(result, len(indices))
    if axis is not None and len(indices) == 2 and (rank := ctx.rank(indices[0])):
        return put_behind(ctx, indices[0], indices[1], axis % rank)
    return None


def _stacked_rows(ctx: OpContext, form: Form, parts: list[Sharded]) -> Fact:
    """Concatenates along the batch axis: sums and means remain valid, the order of the rows changes."""
    if any(part.per is None for part in parts):
        return ctx.unknown("it concatenates batches, and the number of rows per example is not known")
    assert form.rows is not None
    return replace(form, base=joined(ctx, parts, form.rows.axis))


def joined(ctx: OpContext, parts: Sequence[Sharded], axis: int) -> Sharded:
    """Returns the rows of parts one behind the other along an axis.

    Parts counted differently are counted together, equally in each concatenation of parts with these lengths.
    """
    parts = [replace(part, axis=0) for part in parts]
    if len(parts) == 1:
        return replace(parts[0], axis=axis)
    order = (CONCATENATED, *parts)
    sizes = [part.per for part in parts if part.per is not None]
    if len(sizes) == len(parts) and len({part.count for part in parts}) == 1:
        return Sharded(axis, parts[0].count, sum(sizes, Fraction(0)), order)
    named = ctx.named()
    if len(sizes) == len(parts):
        named = ctx.scope.same_as(("joined", *((part.count, part.per) for part in parts)), named)
    return replace(elements_of(named), axis=axis, order=order)


def _concat_counts(ctx: OpContext, forms: Sequence[Form | Statistic | UnknownFact], axis: int | None) -> Form | None:
    """Concatenates rows of examples with rows counted differently, such as those of another data set."""
    known = [form for form in forms if isinstance(form, Form) and form.rows is not None and form.rows.axis == 0]
    if axis != 0 or len(known) < len(forms) or len({form.factors for form in known}) != 1:
        return None
    if len({form.rows.count for form in known if form.rows}) == 1:
        return None
    together = joined(ctx, [form.rows for form in known if form.rows], 0)
    return Form(together, known[0].factors, next((form.mixed_at for form in known if form.mixed_at), None))


def _common_layout(ctx: OpContext, forms: list[Form | Statistic | UnknownFact]) -> Form | Statistic | UnknownFact:
    """Returns the layout common to all inputs, whose rows may differ in order."""
    first = forms[0]
    for form in forms:
        if isinstance(form, (UnknownFact, Statistic)):
            return form if isinstance(form, UnknownFact) else ctx.unknown(form.reason)
    assert isinstance(first, Form)
    known = [form for form in forms if isinstance(form, Form)]
    if len({_without_order(form) for form in known}) == 1:
        mixed = [form.mixed_at for form in known if form.mixed_at]
        return replace(first, mixed_at=mixed[0]) if mixed else first
    if not any(form.rows for form in known):
        return add_forms(ctx, known)
    return ctx.unknown("it combines tensors with and without a batch axis, or sums of different weights")


def _without_order(form: Form) -> object:
    if form.rows is None:
        return (form.base, form.factors)
    return (form.rows.axis, form.rows.count, form.factors)


def _dims_of(ctx: OpContext, indices: Sequence[int]) -> Fact:
    """Concatenates integers of shapes to one vector."""
    dims = [ctx.dims(index) for index in indices]
    if any(entry is None for entry in dims):
        unknown = next((fact for fact in ctx.facts if isinstance(fact, UnknownFact)), None)
        return UnknownFact(unknown.reason) if unknown else ctx.unknown("it builds a shape from unknown lengths")
    forms = tuple(form for entry in dims if entry for form in entry.forms)
    return Dims(forms, tuple(value for entry in dims if entry for value in entry.values))


def pack(ctx: OpContext) -> Fact | list[Fact]:
    """Pack (stack): adds an axis."""
    indices = range(len(ctx.facts))
    if any(isinstance(fact, Dims) for fact in ctx.facts):
        if all(isinstance(fact, (Dims, Form)) and ctx.rank(index) == 0 for index, fact in enumerate(ctx.facts)):
            return _dims_of(ctx, indices)
        if all(form_of(fact) == REPLICATED for fact in ctx.facts):
            return REPLICATED
        return ctx.unknown("it builds a shape from unknown lengths")
    if isinstance(ctx.facts[0], Positions) and ctx.rank(0) == 1:
        return _columns(ctx, ctx.facts[0])
    alike = _common_layout(ctx, [form_of(fact) for fact in ctx.facts])
    if not isinstance(alike, Form) or alike.rows is None:
        return alike
    return by_factors(ctx)


def _columns(ctx: OpContext, first: Positions) -> Fact:
    """Stacks row indices and other coordinates as rows or columns of a matrix."""
    columns = first if len(ctx.facts) == 1 else with_columns(ctx, range(len(ctx.facts)))
    if columns is None:
        return ctx.unknown("it stacks row indices and a tensor of other rows")
    return Columnwise(columns, len(ctx.facts)) if ctx.number("axis") == 0 else columns


def unpack(ctx: OpContext) -> Fact | list[Fact]:
    """Unpack (unstack): removes an axis."""
    fact, number = ctx.facts[0], ctx.number("num")
    if isinstance(fact, Dims) and not fact.is_scalar:
        return [Dims((form,), (value,), True) for form, value in zip(fact.forms, fact.values, strict=True)]
    if isinstance(fact, Positions | Coordinates) and ctx.number("axis") in (1, -1) and ctx.rank(0) == 2:
        first = fact.positions if isinstance(fact, Coordinates) else fact
        return [first, *[Form(first.entries)] * (number - 1)]
    form = form_of(fact)
    if not isinstance(form, Form) or form.rows is None:
        return [form] * number
    return [with_result_axis(ctx, form)] * number


def split(ctx: OpContext) -> Fact | list[Fact]:
    """Split (axis, value)."""
    return _split(ctx, 1, ctx.number("num_split"))


def split_by_sizes(ctx: OpContext) -> Fact | list[Fact]:
    """SplitV (value, sizes, axis)."""
    return _split(ctx, 0, ctx.number("num_split"))


def _split(ctx: OpContext, data: int, number: int) -> Fact | list[Fact]:
    fact = ctx.facts[data]
    if isinstance(fact, Dims) and not fact.is_scalar and ctx.node.op == "SplitV":
        return _parts_of_dims(ctx, fact)
    if isinstance(fact, Dims) and not fact.is_scalar and len(fact.forms) % number == 0:
        each = len(fact.forms) // number
        starts = range(0, len(fact.forms), each) if each else []
        return [Dims(fact.forms[k : k + each], fact.values[k : k + each]) for k in starts]
    form = form_of(fact)
    if not isinstance(form, Form) or form.rows is None:
        return [form] * number
    along_another = with_result_axis(ctx, form, data)
    if isinstance(along_another, Form) or factor_rule(ctx) is None:
        return [along_another] * number
    parts = _unstacked(form, number) if ctx.node.op == "Split" else _split_at_lengths(ctx, form)
    apart = ctx.unknown("it splits the batch axis")
    sizes = ctx.elements(1) if ctx.node.op == "SplitV" else None
    if any(size not in (None, -1) for size in sizes or ()):
        apart = SelectedByPosition(apart.reason)
    return list(parts) if parts else [apart] * number


def _parts_of_dims(ctx: OpContext, dims: Dims) -> list[Fact]:
    """Splits integers of a shape by sizes; one size may be -1, for the remainder."""
    sizes = ctx.elements(1)
    if sizes is None or None in sizes or sizes.count(-1) > 1:
        return [ctx.unknown("the sizes by which it splits a shape are not known")] * ctx.number("num_split")
    known = [size for size in sizes if size is not None]
    left = len(dims.forms) - sum(size for size in known if size != -1)
    ends = list(itertools.accumulate(left if size == -1 else size for size in known))
    return [Dims(dims.forms[start:end], dims.values[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _unstacked(form: Form, number: int) -> list[Form] | None:
    """Returns the parts of a concatenation if it is split exactly at the boundaries of its inputs, else None."""
    parts = _parts_of(form.rows)
    if form.rows is None or len(parts) != number or len({(part.count, part.per) for part in parts}) != 1:
        return None
    return [replace(form, base=replace(part, axis=form.rows.axis)) for part in parts]


def _split_at_lengths(ctx: OpContext, form: Form) -> list[Form] | None:
    """Returns the parts of a concatenation that is split by sizes at boundaries of its inputs, else None."""
    number = ctx.number("num_split")
    sizes = [length(ctx, 1, k) for k in range(number)]
    ends = [*itertools.accumulate(sizes[:-1], plus), None]
    if None in ends[:-1]:
        return None
    parts = [part_between(ctx, form, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    known = [part for part in parts if part is not None]
    return known if len(known) == number else None


def part_between(ctx: OpContext, form: Form, begin: Length, end: Length) -> Form | None:
    """Returns the rows of a concatenation from one boundary of its inputs to another one.

    Args:
        ctx: the op that selects them.
        form: the form of the concatenation.
        begin: the number of rows before them.
        end: the number of rows up to their end; None: all.

    Returns:
        Their form; None if they are not known to begin and end at boundaries.
    """
    parts = _parts_of(form.rows)
    bounds: list[Length] = [0, *itertools.accumulate((replace(part, order=()) for part in parts[:-1]), plus)]
    first, last = (next((k for k, at in enumerate(bounds) if is_same_length(at, of)), None) for of in (begin, end))
    last = len(parts) if end is None else last
    if form.rows is None or first is None or last is None or first >= last:
        return None
    return replace(form, base=joined(ctx, parts[first:last], form.rows.axis))


def _parts_of(rows: Sharded | None) -> list[Sharded]:
    """Returns the parts of concatenated rows; none for other rows."""
    order = rows.order if rows else ()
    parts = [part for part in order[1:] if isinstance(part, Sharded)]
    return parts if order[:1] == (CONCATENATED,) else []


RULES: dict[str, Rule] = {
    "ConcatV2": concat,
    "Concat": concat_old,
    "Pack": pack,
    "Unpack": unpack,
    "Split": split,
    "SplitV": split_by_sizes,
}
