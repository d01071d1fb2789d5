"""Ops that move elements and compute nothing: where does the batch axis go?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import tensorflow as tf

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.combine import change_of_places
from autodist.graph.propagation.distinct import numbers
from autodist.graph.propagation.facts import (
    SAME,
    Base,
    ByColumn,
    Coordinates,
    Dims,
    Fact,
    Form,
    Numbered,
    Positions,
    Rows,
    Statistic,
    UnknownFact,
    form_of,
    is_noise,
    reordered,
    with_axis,
)
from autodist.graph.propagation.lengths import is_length_of, length, length_in_order
from autodist.graph.propagation.numbered import expanded
from autodist.graph.propagation.op_context import OpContext, Rule
from autodist.graph.propagation.shapes import lengths_in_turn

RowsRule = Callable[[OpContext, Form, Rows], Fact]

BEHIND = "behind one another"
"""An order: each tuple after it is a part that holds rows of every example, with its rows for each and their order."""
OVER_AND_OVER = "over and over"
"""An order: the one part after it, as often as is not known."""


def moving(rule: RowsRule, adds_elements: bool = False, drawn: Sequence[int] = ()) -> Callable[[OpContext], Fact]:
    """A rule for ops that move the elements of their first input: what has no rows stays what it is.

    Args:
        rule: what becomes of rows.
        adds_elements: whether the op also makes elements of its own, which only what is the same survives.
        drawn: inputs that may be noise, since how many rows the op makes does not depend on them.
    """

    def apply(site: OpContext) -> Fact:
        if isinstance(site.facts[0], Coordinates) and site.node.op == "ExpandDims":
            return expanded(site, site.facts[0])
        if site.node.op in having(Trait.RESHAPES) and (kept := _kept_by_reshape(site)) is not None:
            return kept
        form = form_of(site.facts[0])
        if isinstance(form, (UnknownFact, Statistic)):
            return form
        if form.rows is not None:
            arguments = [(index, fact) for index, fact in enumerate(site.facts[1:], 1) if isinstance(fact, UnknownFact)]
            unknown = [f for index, f in arguments if index not in drawn or not is_noise(f)]
            return UnknownFact(unknown[0].reason) if unknown else rule(site, form, form.rows)
        if adds_elements and not form.is_same:
            return site.opaque("it adds elements to a sum or mean over the batch")
        return form

    return apply


def by_column(rule: Callable[[OpContext], Fact]) -> Callable[[OpContext], Fact]:
    """A rule for `Transpose`, which makes rows of a matrix its columns."""

    def apply(site: OpContext) -> Fact:
        fact = site.facts[0]
        return fact.columns if isinstance(fact, ByColumn) and site.rank(0) == 2 else rule(site)

    return apply


def transpose(site: OpContext, form: Form, batch: Rows) -> Fact:
    order = site.integers(1)
    if order is None or batch.axis not in order:
        return site.opaque("its permutation is not a constant")
    return with_axis(form, order.index(batch.axis))


def expand_dims(site: OpContext, form: Form, batch: Rows) -> Fact:
    axis, rank = site.scalar(1), site.rank(0)
    if axis is None or (axis < 0 and rank is None):
        return site.opaque("the axis that it adds is not known")
    axis = axis if axis >= 0 else axis + (rank or 0) + 1
    return with_axis(form, batch.axis + (axis <= batch.axis))


def squeeze(site: OpContext, form: Form, batch: Rows) -> Fact:
    shape = site.shape(0)
    dims = list(site.node.attr["squeeze_dims"].list.i)
    if shape.rank is None:
        return site.opaque("the rank of its input is not known")
    if dims:
        axes = {axis % shape.rank for axis in dims}
    else:
        lengths = shape.as_list()
        if any(length is None for axis, length in enumerate(lengths) if axis != batch.axis):
            return site.opaque("it drops all axes of length 1, and which these are is not known")
        axes = {axis for axis, length in enumerate(lengths) if length == 1}
        if lengths[batch.axis] is None:
            return site.opaque(
                "it drops all axes of length 1, and a replica's part may hold one example: name the axis"
            )
    if batch.axis in axes:
        return site.opaque("it drops the batch axis")
    return with_axis(form, batch.axis - sum(axis < batch.axis for axis in axes))


def _kept_by_reshape(site: OpContext) -> Positions | Dims | None:
    """Positions of rows, or one integer of a shape, which stay so whatever shape they are given."""
    fact = site.facts[0]
    if isinstance(fact, Positions):
        return fact
    if isinstance(fact, Dims) and len(fact.forms) == 1 and site.output_shape().rank in (0, 1):
        return replace(fact, is_scalar=site.output_shape().rank == 0)
    return None


def reshape(site: OpContext) -> Fact:
    if isinstance(site.facts[0], Positions):
        return _reshaped_positions(site, site.facts[0])
    if isinstance(site.facts[0], ByColumn):
        is_matrix = site.output_shape().rank == 2 and site.output_shape()[0] == site.facts[0].number
        return site.facts[0] if is_matrix else site.opaque("it cuts positions of entries")
    kept = _kept_by_reshape(site)
    if kept is not None:
        return kept
    form = form_of(site.facts[0])
    if isinstance(form, (UnknownFact, Statistic)):
        return form
    if form.rows is None:
        dims = site.dims(1)
        if dims is None or not dims.is_same:
            return site.opaque("it gives a batch axis to what has none")
        return form if form.base is not Base.ADDED or site.output_shape().rank != 0 else site.additive(form)
    return _reshape_rows(site, form, form.rows)


def _reshaped_positions(site: OpContext, positions: Positions) -> Fact:
    """A vector or a column of numbers stays what it is."""
    shape = site.output_shape()
    if shape.rank == 1 or (shape.rank == 2 and shape[1] == 1):
        return positions
    return site.opaque("it cuts numbers of rows, of which each replica has its own")


def _reshape_rows(site: OpContext, form: Form, batch: Rows) -> Fact:
    dims, before = site.dims(1) or lengths_in_turn(site, 1), site.shape(0)
    if dims is None or before.rank is None:
        return site.opaque("the shape that it makes, or its input's rank, is not known")
    if (counted_alike := _counted_as(site, batch, dims, before)) is not None:
        return replace(form, base=counted_alike)
    counted = [axis for axis, dim in enumerate(dims.forms) if not dim.is_same]
    if any(dims.forms[axis] != count_of(batch) for axis in counted):
        return site.opaque("the shape that it makes depends on the batch in a way that is not followed")
    after = [None if value == -1 else value for value in dims.values]
    open_axes = counted or [axis for axis, value in enumerate(dims.values) if value == -1]
    if not open_axes and before[batch.axis] is not None:
        open_axes = _static_batch(before.as_list(), after, batch)
    if len(open_axes) != 1:
        return site.opaque("the shape that it makes does not show where the batch axis goes")
    layers = _in_layers(site, batch, dims, before)
    if layers is not None:
        return replace(form, base=layers)
    axis = open_axes[0]
    lead_before, lead_after = _product(before.as_list()[: batch.axis]), _product(after[:axis])
    per = _rows_per_example(before.as_list(), after, batch, axis)
    if lead_before is not None and lead_before == lead_after:
        if batch.order and change_of_places(batch) is None and per != batch.per:
            return site.opaque("it cuts rows that are not in the order of the examples")
        return replace(form, base=replace(batch, axis=axis, per=per))
    if axis == 0 and not batch.order and per is not None:
        return replace(form, base=Rows(0, batch.count, per, ("under other axes", lead_before)))
    return site.opaque("it moves the batch axis among others")


def _counted_as(site: OpContext, batch: Rows, dims: Dims, before: tf.TensorShape) -> Rows | None:
    """A vector that gets the length of other rows: it fails where a part has more of the one than of the other.

    So element k of the one and element k of the other belong together in each part just where they do on one device.
    """
    found = length_in_order(site, 1) if before.rank == len(dims.forms) == 1 and not batch.order else None
    if not isinstance(found, Rows) or found.order or found.per is None or found.count == batch.count:
        return None
    return found


def _in_layers(site: OpContext, batch: Rows, dims: Dims, before: tf.TensorShape) -> Rows | None:
    """Rows that stand several times behind one another, once the times have an axis of their own before theirs."""
    parts = {part for part in batch.order[1:] if isinstance(part, tuple)}
    if (
        batch.axis != 0
        or batch.order[:1] not in ((BEHIND,), (OVER_AND_OVER,))
        or len(parts) != 1
        or len(dims.forms) < 2
    ):
        return None
    [(per, order)] = parts
    if per is None or _product(before.as_list()[1:]) != _product(list(dims.values[2:])):
        return None
    is_cut = batch.order[0] == BEHIND and dims.values[0] == len(batch.order) - 1
    is_cut = is_cut and (dims.values[1] == -1 or dims.forms[1] == count_of(batch))
    if is_cut or is_length_of(site, 1, Rows(0, batch.count, per), 1):
        return replace(batch, axis=1, per=per, order=order)
    return None


def count_of(batch: Rows) -> Form:
    return Form(factors=frozenset([(batch.count, 1)]))


def _static_batch(before: list[int | None], after: list[int | None], batch: Rows) -> list[int]:
    """Where a batch axis of fixed length stands after a reshape: behind as many elements as before."""
    lead, length = _product(before[: batch.axis]), before[batch.axis]
    matches = [axis for axis in range(len(after)) if _product(after[:axis]) == lead and (after[axis] or 0) >= 1]
    rest = _product(before[batch.axis + 1 :])
    fits = [
        axis
        for axis in matches
        if after[axis] is not None and rest is not None and length and (after[axis] or 0) % length == 0
    ]
    return fits[-1:] if lead is not None and length != 1 else []


def _rows_per_example(before: list[int | None], after: list[int | None], batch: Rows, axis: int) -> Fraction | None:
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


def pad(site: OpContext, form: Form, batch: Rows) -> Fact:
    if any(length(site, 1, 2 * batch.axis + side) != 0 for side in (0, 1)):
        return site.opaque("it pads the batch axis, or it is not known which axes it pads")
    if form.factors and not (len(site.inputs) < 3 or site.is_zero(2)):
        return site.opaque("it pads scaled rows with a constant")
    return form


def tile(site: OpContext) -> Fact:
    """Tile: the batch axis may not be repeated, and what has none may get one from a count."""
    form = form_of(site.facts[0])
    dims = site.dims(1)
    if isinstance(site.facts[0], Positions) and dims is not None:
        return _tile_numbers(site, site.facts[0], dims)
    if isinstance(form, (UnknownFact, Statistic)) or dims is None:
        return form if isinstance(form, UnknownFact) else site.opaque("how often it repeats is not known")
    if form.rows is None:
        return _tile_same(site, form, dims)
    times = dims.values[form.rows.axis] if dims.is_same else None
    if times == 1:
        return form
    if times is None or times < 1 or form.rows.per is None:
        return site.opaque("it repeats the batch, and it is not known how often")
    order = (BEHIND, *[(form.rows.per, form.rows.order)] * times)
    return replace(form, base=replace(form.rows, per=form.rows.per * times, order=order))


def _tile_numbers(site: OpContext, positions: Positions, dims: Dims) -> Fact:
    """A column of numbers repeated beside itself, what a reshape then makes a vector of; or a vector, over and over."""
    if site.rank(0) == 2 and dims.values[0] == 1 and dims.values[1] and positions.entries.per is not None:
        entries = replace(positions.entries, per=positions.entries.per * dims.values[1])
        return replace(positions, entries=entries)
    if site.rank(0) == 1 and dims.forms[0].is_same:
        part = (positions.entries.per, positions.entries.order)
        rows = replace(positions.entries, per=None, order=(OVER_AND_OVER, part))
        return Numbered(positions.within, Form(rows), positions.covers)
    return site.opaque("it repeats the numbers of all rows")


def _tile_same(site: OpContext, form: Form, dims: Dims) -> Fact:
    counted = [axis for axis, dim in enumerate(dims.forms) if not dim.is_same]
    if not counted:
        return form
    axis = counted[0]
    shape = site.shape(0)
    if len(counted) == 1 and shape.rank and form.base is Base.SAME:
        times, each = length(site, 1, axis), shape[axis]
        if isinstance(times, Rows) and times.per is not None and each is not None:
            return Form(Rows(axis, times.count, times.per * each), form.factors, form.mixed_at)
        factor, exponent = next(iter(dims.forms[axis].factors))
        if len(dims.forms[axis].factors) == 1 and exponent == 1 and factor == Rows(0).count and each == 1:
            return Form(Rows(axis, per=None), form.factors, form.mixed_at)
    return site.opaque("it repeats a tensor as often as there are examples")


def reverse(site: OpContext, form: Form, batch: Rows) -> Fact:
    axes, rank = site.integers(1), site.rank(0)
    if axes is None or rank is None or None in axes:
        return site.opaque("it is not known which axes it reverses")
    return (
        reordered(form, "reversed", site.node.name)
        if batch.axis in [axis % rank for axis in axes if axis is not None]
        else form
    )


def reversed_dims(rule: Callable[[OpContext], Fact]) -> Callable[[OpContext], Fact]:
    """A rule for `ReverseV2`, of a shape too."""

    def apply(site: OpContext) -> Fact:
        dims = site.facts[0]
        if isinstance(dims, Dims) and not dims.is_scalar and site.integers(1) in ([0], [-1]):
            return Dims(dims.forms[::-1], dims.values[::-1])
        return rule(site)

    return apply


def padded_dims(rule: Callable[[OpContext], Fact]) -> Callable[[OpContext], Fact]:
    """A rule for `Pad`, of a shape too, which gets axes of a length that is given."""

    def apply(site: OpContext) -> Fact:
        dims, widths = site.facts[0], site.constant(1)
        filler = site.scalar(2) if len(site.inputs) > 2 else 0
        if not isinstance(dims, Dims) or dims.is_scalar or widths is None or site.node.op == "MirrorPad":
            return rule(site)
        before, after = (int(width) for width in widths.reshape(-1))
        forms = (*[SAME] * before, *dims.forms, *[SAME] * after)
        return Dims(forms, (*[filler] * before, *dims.values, *[filler] * after))

    return apply


def scan(site: OpContext, form: Form, batch: Rows) -> Fact:
    """Cumsum, Cumprod: along other axes each example stays by itself."""
    axis, rank = site.scalar(1), site.rank(0)
    if axis is None or rank is None or axis % rank == batch.axis or (form.factors and site.node.op != "Cumsum"):
        return site.opaque("it runs along the batch")
    return form


def reverse_sequence(site: OpContext) -> Fact:
    form, lengths = site.form(0), site.form(1)
    if not isinstance(form, Form) or not isinstance(lengths, Form):
        return UnknownFact(next(f.reason for f in (form, lengths) if isinstance(f, UnknownFact)))
    batch_axis = site.number("batch_dim")
    fits = lengths.is_same or (lengths.rows is not None and lengths.rows.axis == 0 and not lengths.factors)
    if form.rows is not None and form.rows.axis == batch_axis and fits and (lengths.rows or site.is_uniform(1)):
        return form
    return SAME if form.is_same and lengths.is_same else site.opaque("it does not reverse each example by itself")


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
