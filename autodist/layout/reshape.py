"""Rules for reshapes, which keep the order of the elements."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import tensorflow as tf

from autodist.layout.by_factors import by_factors
from autodist.layout.combine import permutation_of
from autodist.layout.coordinates import expanded
from autodist.layout.distinct import numbers
from autodist.layout.facts import (
    Base,
    Columnwise,
    Coordinates,
    Dims,
    Fact,
    Form,
    Positions,
    Sharded,
    Statistic,
    UnknownFact,
    form_of,
)
from autodist.layout.lengths import is_length_of, length_in_order
from autodist.layout.movement import CONCATENATED, REPEATED
from autodist.layout.op_context import OpContext, Rule
from autodist.layout.shapes import lengths_in_turn

MERGED = "under other axes"
"""An order, followed by the number of elements of the axes before the batch axis that a reshape has merged with it."""


def expand_dims(ctx: OpContext) -> Fact | list[Fact]:
    """ExpandDims: also of coordinates."""
    return expanded(ctx, ctx.facts[0]) if isinstance(ctx.facts[0], Coordinates) else _reshaping(ctx)


def _reshaping(ctx: OpContext) -> Fact | list[Fact]:
    """ExpandDims, Squeeze: also of row positions, and of one integer of a shape."""
    unchanged = _unchanged_by_reshape(ctx)
    return by_factors(ctx) if unchanged is None else unchanged


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
        return replace(form, base=Sharded(0, batch.count, per, (MERGED, lead_before)))
    if batch.axis == 0 and batch.order == (MERGED, lead_after) and lead_after is not None and per is not None:
        return replace(form, base=Sharded(axis, batch.count, per))
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
    parts = {part for part in batch.order[1:] if isinstance(part, Sharded)}
    if (
        batch.axis != 0
        or batch.order[:1] not in ((CONCATENATED,), (REPEATED,))
        or len(parts) != 1
        or len(dims.forms) < 2
    ):
        return None
    [part] = parts
    if part.per is None or _product(before.as_list()[1:]) != _product(list(dims.values[2:])):
        return None
    is_cut = batch.order[0] == CONCATENATED and dims.values[0] == len(batch.order) - 1
    is_cut = is_cut and (dims.values[1] == -1 or dims.forms[1] == count_of(batch))
    if is_cut or is_length_of(ctx, 1, replace(part, order=()), 1):
        return replace(part, axis=1)
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


RULES: dict[str, Rule] = {
    "ExpandDims": expand_dims,
    "Squeeze": _reshaping,
    "Reshape": numbers(reshape),
}
