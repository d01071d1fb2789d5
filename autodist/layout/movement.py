"""Rules for ops that move elements without computing: transposes, padding, tiling, reversal, running sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autodist.graph.ops import factor_rule
from autodist.layout.by_factors import by_factors
from autodist.layout.distinct import numbers
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Columnwise,
    Dims,
    Fact,
    Form,
    Positions,
    RowIndices,
    Sharded,
    Statistic,
    UnknownFact,
    form_of,
    is_noise,
    reordered,
)
from autodist.layout.lengths import length
from autodist.layout.op_context import OpContext, Rule

RowsRule = Callable[[OpContext, Form, Sharded], Fact]

CONCATENATED = "behind one another"
"""An order, followed by parts: each part holds rows of every example, as a pair of rows per example and their order."""
REPEATED = "over and over"
"""An order, followed by one part, which repeats an unknown number of times."""


def moving(rule: RowsRule, adds_elements: bool = False, drawn: Sequence[int] = ()) -> Callable[[OpContext], Fact]:
    """Returns a rule for ops that move the elements of their first input; a layout without rows is unchanged.

    Args:
        rule: the rule for rows.
        adds_elements: True if the op adds elements of its own, which only a replicated layout supports.
        drawn: inputs that may be noise, because the number of rows does not depend on them.
    """

    def apply(ctx: OpContext) -> Fact:
        form = form_of(ctx.facts[0])
        if isinstance(form, (UnknownFact, Statistic)):
            return form
        if form.rows is not None:
            arguments = [(index, fact) for index, fact in enumerate(ctx.facts[1:], 1) if isinstance(fact, UnknownFact)]
            unknown = [f for index, f in arguments if index not in drawn or not is_noise(f)]
            return UnknownFact(unknown[0].reason) if unknown else rule(ctx, form, form.rows)
        if adds_elements and not form.is_replicated:
            return ctx.unknown("it adds elements to a sum or mean over the batch")
        return form

    return apply


def permuting(key: Callable[[OpContext], object]) -> Rule:
    """Returns a rule for ops that permute the elements along some axes of their first input.

    Args:
        key: equal for equal permutations.
    """

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        form, rule = ctx.form(0), factor_rule(ctx)
        if isinstance(form, UnknownFact) or form.rows is None or rule is None:
            return by_factors(ctx)
        if rule.factor(0, form.rows.axis) is not None:
            return by_factors(ctx)
        if any(form_of(fact) != REPLICATED for fact in ctx.facts[1:]):
            return ctx.unknown("its parameters are not replicated")
        return reordered(form, key(ctx), ctx.node.name)

    return apply


def _rolled(ctx: OpContext) -> object:
    """Returns a key for the permutation of a Roll (value, shifts, axes)."""
    shifts = ctx.constant(1)
    by = ctx.inputs[1] if shifts is None else (tuple(shifts.reshape(-1)), tuple(ctx.integers(2) or ()))
    return "rolled", by


def running_sum(ctx: OpContext) -> Fact | list[Fact]:
    """Cumsum: refuses sums over the batch, so that a step reduces these, which are fewer, before their running sums."""
    form = ctx.form(0)
    if isinstance(form, Form) and form.rows is None and not form.is_replicated:
        return ctx.unknown("it adds up sums or means over the batch")
    return by_factors(ctx)


def by_column(rule: Rule) -> Rule:
    """Returns a rule for `Transpose` that also turns the rows of an index matrix into its columns."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        fact = ctx.facts[0]
        return fact.columns if isinstance(fact, Columnwise) and ctx.rank(0) == 2 else rule(ctx)

    return apply


def pad(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    if any(length(ctx, 1, 2 * batch.axis + side) != 0 for side in (0, 1)):
        return ctx.unknown("it pads the batch axis, or the padded axes are not known")
    if form.factors and not (len(ctx.inputs) < 3 or ctx.is_zero(2)):
        return ctx.unknown("it pads scaled rows with a constant")
    return form


def tile(ctx: OpContext) -> Fact:
    """Tile: the batch axis must not repeat unless the count is known; a count of examples adds a batch axis."""
    form = form_of(ctx.facts[0])
    dims = ctx.dims(1)
    if isinstance(ctx.facts[0], Positions) and dims is not None:
        return _tile_numbers(ctx, ctx.facts[0], dims)
    if isinstance(form, (UnknownFact, Statistic)) or dims is None:
        return form if isinstance(form, UnknownFact) else ctx.unknown("the number of repetitions is not known")
    if form.rows is None:
        return _tile_same(ctx, form, dims)
    times = dims.values[form.rows.axis] if dims.is_replicated else None
    if times == 1:
        return form
    if times is None or times < 1 or form.rows.per is None:
        return ctx.unknown("it repeats the batch an unknown number of times")
    order = (CONCATENATED, *[replace(form.rows, axis=0)] * times)
    return replace(form, base=replace(form.rows, per=form.rows.per * times, order=order))


def _tile_numbers(ctx: OpContext, positions: Positions, dims: Dims) -> Fact:
    """Tiles row indices: a column along its second axis, for a reshape to a vector; or a vector along its only axis."""
    if ctx.rank(0) == 2 and dims.values[0] == 1 and dims.values[1] and positions.entries.per is not None:
        entries = replace(positions.entries, per=positions.entries.per * dims.values[1])
        return replace(positions, entries=entries)
    if ctx.rank(0) == 1 and dims.forms[0].is_replicated:
        rows = replace(positions.entries, per=None, order=(REPEATED, replace(positions.entries, axis=0)))
        return RowIndices(positions.within, Form(rows), positions.covers)
    return ctx.unknown("it repeats the indices of all rows")


def _tile_same(ctx: OpContext, form: Form, dims: Dims) -> Fact:
    counted = [axis for axis, dim in enumerate(dims.forms) if not dim.is_replicated]
    if not counted:
        return form
    axis = counted[0]
    shape = ctx.shape(0)
    if len(counted) == 1 and shape.rank and form.base is Base.REPLICATED:
        times, each = length(ctx, 1, axis), shape[axis]
        if isinstance(times, Sharded) and times.per is not None and each is not None:
            return Form(Sharded(axis, times.count, times.per * each), form.factors, form.mixed_at)
        factor, exponent = next(iter(dims.forms[axis].factors))
        if len(dims.forms[axis].factors) == 1 and exponent == 1 and factor == Sharded(0).count and each == 1:
            return Form(Sharded(axis, per=None), form.factors, form.mixed_at)
    return ctx.unknown("it repeats a tensor as often as there are examples")


def reversed_dims(rule: Rule) -> Rule:
    """Returns a rule for `ReverseV2` that also reverses a shape."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        dims = ctx.facts[0]
        if isinstance(dims, Dims) and not dims.is_scalar and ctx.integers(1) in ([0], [-1]):
            return Dims(dims.forms[::-1], dims.values[::-1])
        return rule(ctx)

    return apply


def padded_dims(rule: Callable[[OpContext], Fact]) -> Callable[[OpContext], Fact]:
    """Returns a rule for `Pad` that also pads a shape with axes of constant length."""

    def apply(ctx: OpContext) -> Fact:
        dims, widths = ctx.facts[0], ctx.constant(1)
        filler = ctx.scalar(2) if len(ctx.inputs) > 2 else 0
        if not isinstance(dims, Dims) or dims.is_scalar or widths is None or ctx.node.op == "MirrorPad":
            return rule(ctx)
        before, after = (int(width) for width in widths.reshape(-1))
        forms = (*[REPLICATED] * before, *dims.forms, *[REPLICATED] * after)
        return Dims(forms, (*[filler] * before, *dims.values, *[filler] * after))

    return apply


RULES: dict[str, Rule] = {
    "Transpose": by_column(numbers(by_factors)),
    **dict.fromkeys(["Pad", "PadV2", "MirrorPad"], padded_dims(moving(pad, adds_elements=True))),
    "MirrorPadGrad": moving(pad),
    "Tile": tile,
    "Cumsum": running_sum,
    "ReverseV2": reversed_dims(permuting(lambda ctx: "reversed")),
    "Roll": permuting(_rolled),
}
