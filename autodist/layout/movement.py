"""Rules for ops that move elements without computing: transposes, reshapes, padding, tiling, reversal and scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import tensorflow as tf

from autodist.graph.ops import Trait, having
from autodist.layout.combine import permutation_of
from autodist.layout.coordinates import expanded
from autodist.layout.distinct import numbers
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Columnwise,
    Coordinates,
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
    with_axis,
)
from autodist.layout.lengths import is_length_of, length, length_in_order
from autodist.layout.op_context import OpContext, Rule
from autodist.layout.shapes import lengths_in_turn

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
        if isinstance(ctx.facts[0], Coordinates) and ctx.node.op == "ExpandDims":
            return expanded(ctx, ctx.facts[0])
        if ctx.node.op in having(Trait.RESHAPES) and (unchanged := _unchanged_by_reshape(ctx)) is not None:
            return unchanged
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


def by_column(rule: Callable[[OpContext], Fact]) -> Callable[[OpContext], Fact]:
    """Returns a rule for `Transpose` that also turns the rows of an index matrix into its columns."""

    def apply(ctx: OpContext) -> Fact:
        fact = ctx.facts[0]
        return fact.columns if isinstance(fact, Columnwise) and ctx.rank(0) == 2 else rule(ctx)

    return apply


def transpose(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    order = ctx.integers(1)
    if order is None or batch.axis not in order:
        return ctx.unknown("its permutation is not a constant")
    return with_axis(form, order.index(batch.axis))


def expand_dims(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    axis, rank = ctx.scalar(1), ctx.rank(0)
    if axis is None or (axis < 0 and rank is None):
        return ctx.unknown("the axis that it adds is not known")
    axis = axis if axis >= 0 else axis + (rank or 0) + 1
    return with_axis(form, batch.axis + (axis <= batch.axis))


def squeeze(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    shape = ctx.shape(0)
    dims = list(ctx.node.attr["squeeze_dims"].list.i)
    if shape.rank is None:
        return ctx.unknown("the rank of its input is not known")
    if dims:
        axes = {axis % shape.rank for axis in dims}
    else:
        lengths = shape.as_list()
        if any(length is None for axis, length in enumerate(lengths) if axis != batch.axis):
            return ctx.unknown("it removes all axes of length 1, but not all lengths are known")
        axes = {axis for axis, length in enumerate(lengths) if length == 1}
        if lengths[batch.axis] is None:
            return ctx.unknown(
                "it removes all axes of length 1, and a replica's shard may contain a single example; set `axis`"
            )
    if batch.axis in axes:
        return ctx.unknown("it removes the batch axis")
    return with_axis(form, batch.axis - sum(axis < batch.axis for axis in axes))


def _unchanged_by_reshape(ctx: OpContext) -> Positions | Dims | None:
    """Returns the layout of row positions, or of one integer of a shape, if a reshape does not change it."""
    fact = ctx.facts[0]
    if isinstance(fact, Positions):
        return fact
    if isinstance(fact, Dims) and len(fact.forms) == 1 and ctx.output_shape().rank in (0, 1):
        return replace(fact, is_scalar=ctx.output_shape().rank == 0)
    return None


def reshape(ctx: OpContext) -> Fact:
    if isinstance(ctx.facts[0], Positions):
        return _reshaped_positions(ctx, ctx.facts[0])
    if isinstance(ctx.facts[0], Columnwise):
        is_matrix = ctx.output_shape().rank == 2 and ctx.output_shape()[0] == ctx.facts[0].number
        return ctx.facts[0] if is_matrix else ctx.unknown("it splits the index matrix of a sparse tensor")
    unchanged = _unchanged_by_reshape(ctx)
    if unchanged is not None:
        return unchanged
    form = form_of(ctx.facts[0])
    if isinstance(form, (UnknownFact, Statistic)):
        return form
    if form.rows is None:
        dims = ctx.dims(1)
        if dims is None or not dims.is_replicated:
            return ctx.unknown("it adds a batch axis to a tensor that has none")
        return form if form.base is not Base.PARTIAL_SUM or ctx.output_shape().rank != 0 else ctx.additive(form)
    return _reshape_rows(ctx, form, form.rows)


def _reshaped_positions(ctx: OpContext, positions: Positions) -> Fact:
    """Returns the layout of reshaped row indices; a vector or a column is unchanged."""
    shape = ctx.output_shape()
    if shape.rank == 1 or (shape.rank == 2 and shape[1] == 1):
        return positions
    return ctx.unknown("it splits a vector of row indices, which differ on each replica")


def _reshape_rows(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    dims, before = ctx.dims(1) or lengths_in_turn(ctx, 1), ctx.shape(0)
    if dims is None or before.rank is None:
        return ctx.unknown("the new shape or the rank of the input is not known")
    if (counted_alike := _with_count_of(ctx, batch, dims, before)) is not None:
        return replace(form, base=counted_alike)
    counted = [axis for axis, dim in enumerate(dims.forms) if not dim.is_replicated]
    if any(dims.forms[axis] != count_of(batch) for axis in counted):
        return ctx.unknown("the new shape depends on the batch in an unsupported way")
    after = [None if value == -1 else value for value in dims.values]
    open_axes = counted or [axis for axis, value in enumerate(dims.values) if value == -1]
    if not open_axes and before[batch.axis] is not None:
        open_axes = _static_batch(before.as_list(), after, batch)
    if len(open_axes) != 1:
        return ctx.unknown("the new shape does not determine the position of the batch axis")
    layers = _split_repetitions(ctx, batch, dims, before)
    if layers is not None:
        return replace(form, base=layers)
    axis = open_axes[0]
    lead_before, lead_after = _product(before.as_list()[: batch.axis]), _product(after[:axis])
    per = _rows_per_example(before.as_list(), after, batch, axis)
    if lead_before is not None and lead_before == lead_after:
        if batch.order and permutation_of(batch) is None and per != batch.per:
            return ctx.unknown("it splits rows that are not in the order of the examples")
        return replace(form, base=replace(batch, axis=axis, per=per))
    if axis == 0 and not batch.order and per is not None:
        return replace(form, base=Sharded(0, batch.count, per, ("under other axes", lead_before)))
    return ctx.unknown("it merges the batch axis with other axes")


def _with_count_of(ctx: OpContext, batch: Sharded, dims: Dims, before: tf.TensorShape) -> Sharded | None:
    """Returns the rows for a vector reshaped to the length of other rows; the reshape fails if the lengths differ.

    Therefore element k of both vectors belong together in each shard exactly if they do on one device.
    """
    result = length_in_order(ctx, 1) if before.rank == len(dims.forms) == 1 and not batch.order else None
    if not isinstance(result, Sharded) or result.order or result.per is None or result.count == batch.count:
        return None
    return result


def _split_repetitions(ctx: OpContext, batch: Sharded, dims: Dims, before: tf.TensorShape) -> Sharded | None:
    """Returns the rows of a repeated batch once the repetitions have an axis of their own before the batch axis."""
    parts = {part for part in batch.order[1:] if isinstance(part, tuple)}
    if (
        batch.axis != 0
        or batch.order[:1] not in ((CONCATENATED,), (REPEATED,))
        or len(parts) != 1
        or len(dims.forms) < 2
    ):
        return None
    [(per, order)] = parts
    if per is None or _product(before.as_list()[1:]) != _product(list(dims.values[2:])):
        return None
    is_cut = batch.order[0] == CONCATENATED and dims.values[0] == len(batch.order) - 1
    is_cut = is_cut and (dims.values[1] == -1 or dims.forms[1] == count_of(batch))
    if is_cut or is_length_of(ctx, 1, Sharded(0, batch.count, per), 1):
        return replace(batch, axis=1, per=per, order=order)
    return None


def count_of(batch: Sharded) -> Form:
    return Form(factors=frozenset([(batch.count, 1)]))


def _static_batch(before: list[int | None], after: list[int | None], batch: Sharded) -> list[int]:
    """Returns the axis of a batch of static length after a reshape: it follows as many elements as before."""
    lead, length = _product(before[: batch.axis]), before[batch.axis]
    matches = [axis for axis in range(len(after)) if _product(after[:axis]) == lead and (after[axis] or 0) >= 1]
    rest = _product(before[batch.axis + 1 :])
    fits = [
        axis
        for axis in matches
        if after[axis] is not None and rest is not None and length and (after[axis] or 0) % length == 0
    ]
    return fits[-1:] if lead is not None and length != 1 else []


def _rows_per_example(before: list[int | None], after: list[int | None], batch: Sharded, axis: int) -> Fraction | None:
    if batch.per is None:
        return None
    inside_before = _product([*before[: batch.axis], *before[batch.axis + 1 :]])
    inside_after = _product([*after[:axis], *after[axis + 1 :]])
    if not inside_before or not inside_after or inside_after < 0:
        return None
    return batch.per * inside_before / inside_after


def _product(lengths: list[int | None]) -> int | None:
    total = 1
    for known in lengths:
        if known is None:
            return None
        total *= known
    return total


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
    order = (CONCATENATED, *[(form.rows.per, form.rows.order)] * times)
    return replace(form, base=replace(form.rows, per=form.rows.per * times, order=order))


def _tile_numbers(ctx: OpContext, positions: Positions, dims: Dims) -> Fact:
    """Tiles row indices: a column along its second axis, for a reshape to a vector; or a vector along its only axis."""
    if ctx.rank(0) == 2 and dims.values[0] == 1 and dims.values[1] and positions.entries.per is not None:
        entries = replace(positions.entries, per=positions.entries.per * dims.values[1])
        return replace(positions, entries=entries)
    if ctx.rank(0) == 1 and dims.forms[0].is_replicated:
        part = (positions.entries.per, positions.entries.order)
        rows = replace(positions.entries, per=None, order=(REPEATED, part))
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


def reverse(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    axes, rank = ctx.integers(1), ctx.rank(0)
    if axes is None or rank is None or None in axes:
        return ctx.unknown("the reversed axes are not known")
    return (
        reordered(form, "reversed", ctx.node.name)
        if batch.axis in [axis % rank for axis in axes if axis is not None]
        else form
    )


def reversed_dims(rule: Callable[[OpContext], Fact]) -> Callable[[OpContext], Fact]:
    """Returns a rule for `ReverseV2` that also reverses a shape."""

    def apply(ctx: OpContext) -> Fact:
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


def scan(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    """Cumsum, Cumprod: along axes other than the batch axis, examples stay independent."""
    axis, rank = ctx.scalar(1), ctx.rank(0)
    if axis is None or rank is None or axis % rank == batch.axis or (form.factors and ctx.node.op != "Cumsum"):
        return ctx.unknown("it runs along the batch axis")
    return form


def reverse_sequence(ctx: OpContext) -> Fact:
    form, lengths = ctx.form(0), ctx.form(1)
    if not isinstance(form, Form) or not isinstance(lengths, Form):
        return UnknownFact(next(f.reason for f in (form, lengths) if isinstance(f, UnknownFact)))
    batch_axis = ctx.number("batch_dim")
    fits = lengths.is_replicated or (lengths.rows is not None and lengths.rows.axis == 0 and not lengths.factors)
    if form.rows is not None and form.rows.axis == batch_axis and fits and (lengths.rows or ctx.is_uniform(1)):
        return form
    return (
        REPLICATED
        if form.is_replicated and lengths.is_replicated
        else ctx.unknown("it does not reverse each example independently")
    )


RULES: dict[str, Rule] = {
    "Transpose": by_column(numbers(moving(transpose))),
    "ExpandDims": moving(expand_dims),
    "Squeeze": moving(squeeze),
    "Reshape": numbers(reshape),
    **dict.fromkeys(["Pad", "PadV2", "MirrorPad"], padded_dims(moving(pad, adds_elements=True))),
    "Tile": tile,
    "ReverseV2": reversed_dims(moving(reverse)),
    **dict.fromkeys(["Cumsum", "Cumprod", "CumulativeLogsumexp"], moving(scan, adds_elements=True)),
    "ReverseSequence": reverse_sequence,
}
