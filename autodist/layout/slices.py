"""Rules for slices: of whole batches along other axes, or of a shape's elements."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops import sliced_axes
from autodist.layout.concatenation import part_between
from autodist.layout.entries import column
from autodist.layout.factors import EXAMPLES
from autodist.layout.facts import (
    Coordinates,
    Dims,
    Fact,
    Form,
    Positions,
    RowsWithTail,
    SelectedByPosition,
    Sharded,
    UnknownFact,
    reordered,
    with_axis,
)
from autodist.layout.lengths import is_length_of, length, plus
from autodist.layout.movement import moving
from autodist.layout.op_context import OpContext, Rule
from autodist.layout.reshape import count_of
from autodist.layout.sampling import one_part


def strided_slice(ctx: OpContext) -> Fact:
    fact = ctx.facts[0]
    if isinstance(fact, Dims) and not fact.is_scalar:
        return _slice_of_dims(ctx, fact)
    if isinstance(fact, Dims) and ctx.number("new_axis_mask") == 1 and ctx.shape(1).as_list() == [1]:
        return replace(fact, is_scalar=False)  # n[None]
    if isinstance(fact, Positions) and (_only_adds_an_axis(ctx) or _keeps_rows(ctx, fact)):
        return fact
    if isinstance(fact, Coordinates):
        return column(ctx, fact)
    result = moving(lambda ctx, form, batch: strided_rows(ctx, form, batch, ctx.rank(0)), drawn=(1, 2))(ctx)
    drops_axes = bool(ctx.number("shrink_axis_mask"))
    is_plain = isinstance(result, UnknownFact) and not isinstance(result, SelectedByPosition)
    return UnknownFact(result.reason) if isinstance(result, UnknownFact) and is_plain and drops_axes else result


def _only_adds_an_axis(ctx: OpContext) -> bool:
    """Returns True for x[:, None] of a vector."""
    takes_all = ctx.number("begin_mask") & ctx.number("end_mask") & 1
    return bool(takes_all) and ctx.number("new_axis_mask") == 2 and not ctx.number("shrink_axis_mask")


def _keeps_rows(ctx: OpContext, positions: Positions) -> bool:
    """Returns True if it selects columns only, each with all row indices: x[:, 0]."""
    result = strided_rows(ctx, Form(positions.entries), positions.entries, 2) if ctx.rank(0) == 2 else None
    return isinstance(result, Form) and result.base == positions.entries and not result.mixed_at


def _slice_of_dims(ctx: OpContext, dims: Dims) -> Fact:
    begin, end, stride = (ctx.scalar(index) for index in (1, 2, 3))
    if any(ctx.number(mask) for mask in ("ellipsis_mask", "new_axis_mask")):
        return ctx.unknown("it slices a shape in an unsupported way")
    from_start, to_end = ctx.number("begin_mask") & 1, ctx.number("end_mask") & 1
    if stride is None or (begin is None and not from_start) or (end is None and not to_end):
        return ctx.unknown("the sliced part of a shape is not known")
    if ctx.number("shrink_axis_mask") & 1:
        if begin is None or not -len(dims.forms) <= begin < len(dims.forms):
            return ctx.unknown("it takes an element outside the shape")
        return Dims((dims.forms[begin],), (dims.values[begin],), True)
    part = slice(None if from_start else begin, None if to_end else end, stride)
    return Dims(dims.forms[part], dims.values[part])


def strided_rows(ctx: OpContext, form: Form, batch: Sharded, rank: int | None) -> Fact:
    """Returns the layout of a strided slice of a tensor of this rank; `batch` names its batch axis."""
    axes = sliced_axes(ctx, rank)
    if axes is None:
        return ctx.unknown("the rank of its input is not known")
    axis = axes[batch.axis]
    moved = with_axis(form, axis.target)
    return moved if axis.entry is None else _sliced_rows(ctx, moved, axis.entry, axis.shrinks)


def _sliced_rows(ctx: OpContext, form: Form, entry: int, shrinks: bool) -> Fact:
    """Returns the layout of rows sliced by an entry of the slice; `form` is that of the result if all are taken."""
    begin, end, stride = (ctx.dims(index) for index in (1, 2, 3))
    from_start, to_end = (bool(ctx.number(mask) & (1 << entry)) for mask in ("begin_mask", "end_mask"))
    starts = from_start or (begin is not None and begin.values[entry] == 0)
    assert form.rows is not None
    ends_at_count = end is not None and end.forms[entry] == count_of(form.rows) and form.rows.per == 1
    step = stride.values[entry] if stride is not None and not shrinks else None
    if starts and (to_end or ends_at_count) and step == 1:
        return form
    first_row = 0 if from_start else length(ctx, 1, entry)
    last_row = None if to_end else length(ctx, 2, entry)
    if step == 1 and (to_end or last_row is not None):
        part = part_between(ctx, form, first_row, last_row)
        if part is not None:
            return part
    if from_start and to_end and step == -1:
        return reordered(form, "reversed", ctx.node.name)
    first = 0 if from_start else begin.values[entry] if begin is not None else None
    last = None if to_end or end is None else end.values[entry]
    if shrinks:
        return _by_position(ctx, form.rows, first is not None, 1 if first in (0, -1) else None)
    if step is not None and step > 1 and to_end and first is not None and 0 <= first < step:
        # x[::2] selects the same rows if the lengths of the shards are multiples of the step.
        return _by_position(ctx, form.rows, False)
    number = _count_selected(first, last, to_end) if step == 1 else None
    return _by_position(ctx, form.rows, bool(first) or last is not None, number)


def _count_selected(first: int | None, last: int | None, to_end: bool) -> int | None:
    """Returns the number of rows of x[:last], or of x[-n:]; None for other slices."""
    if first == 0:
        return last
    return -first if to_end and first is not None else None


def _by_position(ctx: OpContext, batch: Sharded, by_constants: bool, number: int | None = None) -> UnknownFact:
    """Returns the unknown fact for rows selected by position.

    Args:
        ctx: the op.
        batch: the rows.
        by_constants: True if the positions are constants.
        number: the number of selected rows if they are all rows of a batch with no more; else None, or less than 1.
    """
    unknown = ctx.unknown("it takes some rows of the batch by position")
    if not by_constants:
        return unknown
    whole_up_to = None
    if batch.count == EXAMPLES and batch.per and not batch.order and number is not None and number > 0:
        whole_up_to = int(number / batch.per)
    return SelectedByPosition(unknown.reason, whole_up_to=whole_up_to)


def slice_(ctx: OpContext) -> Fact:
    """Slice (value, begin, size)."""
    fact = ctx.facts[0]
    begin, size = ctx.integers(1), ctx.integers(2)
    if isinstance(fact, Dims) and not fact.is_scalar:
        if begin is None or size is None or begin[0] is None or size[0] is None:
            return ctx.unknown("the sliced part of a shape is not known")
        part = slice(begin[0], None if size[0] == -1 else begin[0] + size[0])
        return Dims(fact.forms[part], fact.values[part])
    if isinstance(fact, RowsWithTail):
        return one_part(ctx)
    return moving(_slice_rows, drawn=(1,))(ctx)


def _slice_rows(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    begin, size = ctx.elements(1), ctx.elements(2)
    from_start = begin is not None and begin[batch.axis] == 0
    to_end = size is not None and size[batch.axis] == -1
    if from_start and (to_end or is_length_of(ctx, 2, batch, batch.axis)):
        return form
    start = length(ctx, 1, batch.axis)
    end = None if to_end else plus(start, length(ctx, 2, batch.axis))
    if to_end or end is not None:
        part = part_between(ctx, form, start, end)
        if part is not None:
            return part
    first, number = (known[batch.axis] if known is not None else None for known in (begin, size))
    is_named = bool(first) or (number is not None and number != -1)
    return _by_position(ctx, batch, is_named, number if from_start else None)


RULES: dict[str, Rule] = {
    "StridedSlice": strided_slice,
    "Slice": slice_,
}
