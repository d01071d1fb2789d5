"""Rules for shapes, sizes and fills: integers, some of them counts of examples."""

from __future__ import annotations

from dataclasses import replace

import tensorflow as tf

from autodist.graph.names import data_inputs
from autodist.layout.combine import permutation_of, with_result_axis
from autodist.layout.factors import NONE, Count, additive_over, power
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Dims,
    Fact,
    Form,
    Recovery,
    Sharded,
    Statistic,
    UnknownFact,
    form_of,
    rows_of,
)
from autodist.layout.lengths import length_in_order
from autodist.layout.op_context import OpContext, Rule, tensor_name
from autodist.layout.row_indices import all_rows, put_back


def shape(ctx: OpContext) -> Fact:
    """Shape: the batch axis counts rows, all other lengths are replicated."""
    return _shape_of(ctx, 0)


def shapes(ctx: OpContext) -> list[Fact]:
    """ShapeN."""
    return [_shape_of(ctx, index) for index in range(len(ctx.facts))]


def size(ctx: OpContext) -> Fact:
    """Size: the number of elements."""
    form = form_of(rows_of(ctx.facts[0]))
    known = ctx.shape(0).num_elements()
    if isinstance(form, UnknownFact) and known is None:
        return ctx.unknown(f"it measures the size of an unknown tensor: {form.reason}")
    if isinstance(form, Form) and form.rows is not None:
        return Dims((Form(factors=power(form.rows.count, 1)),), (known,), True)
    return Dims((REPLICATED,), (known,), True)


def rank(ctx: OpContext) -> Fact:
    """Rank: the number of axes."""
    return Dims((REPLICATED,), (ctx.rank(0),), True)


def _shape_of(ctx: OpContext, index: int) -> Fact:
    form = form_of(rows_of(ctx.facts[index]))
    known = ctx.shape(index)
    is_open = not known.is_fully_defined()
    if isinstance(form, UnknownFact) and form.recovery is not Recovery.ALWAYS and is_open:
        return ctx.unknown(f"it measures the shape of an unknown tensor: {form.reason}")
    if known.rank is None:
        return (
            REPLICATED
            if not isinstance(form, Form) or form.rows is None
            else ctx.unknown("its input's rank is not known")
        )
    batch = form.rows if isinstance(form, Form) else None
    forms = [REPLICATED] * known.rank
    if batch is not None:
        forms[batch.axis] = Form(factors=power(batch.count, 1))
    return Dims(tuple(forms), tuple(known.as_list()))


def fill(ctx: OpContext) -> Fact:
    """Fill: rows if its shape holds the batch."""
    return spread(ctx, ctx.dims(0), form_of(ctx.facts[1]))


def empty(ctx: OpContext) -> Fact:
    """Empty: zeros if `init` is set."""
    if not ctx.flag("init"):
        return ctx.unknown("its memory is not initialised")
    return spread(ctx, ctx.dims(0), REPLICATED)


def broadcast_to(ctx: OpContext) -> Fact:
    """BroadcastTo: like broadcasting against a tensor of the requested shape."""
    value = form_of(ctx.facts[0])
    dims = ctx.dims(1)
    if not isinstance(value, Form) or value.rows is None:
        return spread(ctx, dims, value)
    moved = with_result_axis(ctx, value)
    if dims is None or isinstance(moved, UnknownFact) or moved.rows is None:
        return ctx.unknown("the shape that it is broadcast to is not known")
    if any(not form.is_replicated for axis, form in enumerate(dims.forms) if axis != moved.rows.axis):
        return ctx.unknown("it is broadcast along a second axis that depends on the batch")
    return moved


def spread(ctx: OpContext, dims: Dims | None, value: Form | Statistic | UnknownFact) -> Fact:
    """Repeats a value without a batch axis over a shape that may hold one."""
    if isinstance(value, UnknownFact):
        return value
    if dims is None:
        return ctx.unknown("its shape is not known")
    batch = counted_batch(ctx, 1 if ctx.node.op == "BroadcastTo" else 0, dims)
    if batch is None:
        if dims.is_replicated:
            return value
        return ctx.unknown("its shape depends on the batch other than by one axis of examples")
    if isinstance(value, Statistic) or value.base is not Base.REPLICATED:
        return _spread_statistic(ctx, value, batch)
    return Form(batch, value.factors, value.mixed_at)


def _spread_statistic(ctx: OpContext, value: Form | Statistic, batch: Sharded) -> Fact:
    is_mean = isinstance(value, Statistic) or value.degree == 0
    if is_mean and ctx.rank(0 if ctx.node.op == "BroadcastTo" else 1) not in (0, None):
        return Form(batch, mixed_at=ctx.node.name)
    return ctx.unknown("it repeats a sum over the batch for each example")


def lengths_in_turn(ctx: OpContext, index: int) -> Dims | None:
    """Returns the lengths of several shapes, interleaved axis by axis, as in the gradient of Tile; None otherwise."""
    flat = ctx.scope.producer(ctx.inputs[index])
    turned = _read_by(ctx, flat, "Reshape")
    node = _read_by(ctx, turned, "Transpose")
    if turned is None or node is None or node.op != "Pack":
        return None
    order = ctx.scope.constant(tensor_name(turned.input[1]))
    if order is None or order.tolist() != [1, 0]:
        return None
    inputs = data_inputs(node)
    packed = OpContext(node, inputs, [ctx.scope.fact(name) for name in inputs], ctx.scope)
    shapes = [packed.dims(k) for k in range(len(inputs))]
    known = [dims for dims in shapes if dims is not None and not dims.is_scalar]
    if packed.number("axis") != 0 or len(known) != len(shapes) or len({len(dims.forms) for dims in known}) != 1:
        return None
    forms = [form for axis in zip(*(dims.forms for dims in known), strict=True) for form in axis]
    values = [value for axis in zip(*(dims.values for dims in known), strict=True) for value in axis]
    return Dims(tuple(forms), tuple(values))


def _read_by(ctx: OpContext, node: tf.compat.v1.NodeDef | None, op: str) -> tf.compat.v1.NodeDef | None:
    """Returns the producer of the first input of a node, if that node has this op."""
    return None if node is None or node.op != op else ctx.scope.producer(tensor_name(node.input[0]))


def batch_of(dims: Dims) -> Sharded | None:
    """Returns the one axis of a shape that counts rows; None if there is not exactly one."""
    counted = [(axis, form) for axis, form in enumerate(dims.forms) if not form.is_replicated]
    if len(counted) != 1 or counted[0][1].base is not Base.REPLICATED:
        return None
    axis, form = counted[0]
    count = additive_over(form.factors, NONE)
    return Sharded(axis, count, per=None) if isinstance(count, Count) else None


def counted_batch(ctx: OpContext, index: int, dims: Dims) -> Sharded | None:
    """Returns the one axis of an input's shape that counts rows, with the rows per example if known.

    The order is that of the measured rows, before any permutation of the examples within their shard. A tensor created
    from a shape is random or constant, so that any order fits.
    """
    batch = batch_of(dims)
    counted = None if batch is None else length_in_order(ctx, index, batch.axis)
    if batch is None or not isinstance(counted, Sharded):
        return batch
    change = permutation_of(counted)
    return replace(batch, per=counted.per, order=counted.order if change is None else change.before)


def ones_like(ctx: OpContext) -> Fact:
    """OnesLike, ZerosLike: only the shape of the input matters."""
    form = form_of(ctx.facts[0])
    if isinstance(form, Form) and form.rows is not None:
        return Form(form.rows)
    return form if isinstance(form, UnknownFact) else REPLICATED


def stitch(ctx: OpContext) -> Fact:
    """DynamicStitch of rows, or of integers of shapes at constant indices."""
    if (rows := put_back(ctx)) is not None:
        return rows
    half = len(ctx.facts) // 2
    indices, dims = [ctx.elements(k) for k in range(half)], [ctx.dims(k) for k in range(half, 2 * half)]
    if any(places is None or None in places for places in indices) or any(entry is None for entry in dims):
        return ctx.unknown("its indices are not known")
    result: dict[int, tuple[Form, int | None]] = {}
    for places, entry in zip(indices, dims, strict=True):
        assert places is not None and entry is not None
        if len(places) != len(entry.forms):
            return ctx.unknown("it stitches vectors of more than one element")
        for place, form, value in zip(places, entry.forms, entry.values, strict=True):
            assert place is not None
            result[place] = (form, value)
    if sorted(result) != list(range(len(result))):
        return ctx.unknown("its indices leave gaps")
    return Dims(tuple(result[k][0] for k in range(len(result))), tuple(result[k][1] for k in range(len(result))))


def broadcast_shapes(ctx: OpContext) -> Fact:
    """BroadcastArgs: the broadcast shape of two shapes."""
    left, right = ctx.dims(0), ctx.dims(1)
    if left is None or right is None:
        return ctx.unknown("the shapes that it broadcasts are not known")
    longer, shorter = sorted((left, right), key=lambda dims: -len(dims.forms))
    skipped = len(longer.forms) - len(shorter.forms)
    forms, values = list(longer.forms), list(longer.values)
    for axis, (form, value) in enumerate(zip(shorter.forms, shorter.values, strict=True), skipped):
        if (forms[axis], values[axis]) == (REPLICATED, 1):
            forms[axis], values[axis] = form, value
        elif form == forms[axis] == REPLICATED and None in (value, values[axis]):
            # A length that is unknown at tracing is 1 or the other one.
            values[axis] = next((v for v in (value, values[axis]) if v not in (None, 1)), None)
        elif (form, value) != (REPLICATED, 1) and (form, value) != (forms[axis], values[axis]):
            return ctx.unknown("it broadcasts shapes that are not known to be compatible")
    return Dims(tuple(forms), tuple(values))


def concat_offsets(ctx: OpContext) -> list[Fact]:
    """ConcatOffset: the start of each operand in a concatenation; its gradient slices there."""
    axis, dims = ctx.scalar(0), [ctx.dims(k) for k in range(1, len(ctx.facts))]
    if axis is None or any(entry is None for entry in dims):
        return [ctx.unknown("the lengths that it sums are not known")] * len(dims)
    result: list[Fact] = []
    begin: int | None = 0
    for entry in dims:
        assert entry is not None
        result.append(
            Dims((REPLICATED,) * len(entry.forms), tuple(begin if k == axis else 0 for k in range(len(entry.forms))))
        )
        if not entry.forms[axis].is_replicated:
            behind = ctx.unknown("the operand after rows of the batch begins where the replica's shard of it ends")
            return [*result, *[behind] * (len(dims) - len(result))]
        length = entry.values[axis]
        begin = None if begin is None or length is None else begin + length
    return result


def _of_shapes(rule: Rule) -> Rule:
    """Extends a rule for integers of shapes: if all inputs are replicated, so is the result."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        result = rule(ctx)
        are_same = all(form_of(fact) == REPLICATED for fact in ctx.facts)
        return REPLICATED if are_same and isinstance(result, UnknownFact) else result

    return apply


def arange(ctx: OpContext) -> Fact:
    """Range, LinSpace: row indices within the replica's shard cannot be combined."""
    positions = all_rows(ctx) if ctx.node.op == "Range" else None
    if positions is not None:
        return positions
    dims = [ctx.dims(index) for index in range(len(ctx.facts))]
    if all(entry is not None and entry.is_replicated for entry in dims):
        return REPLICATED
    return ctx.unknown("it counts positions in the batch, which each replica counts for its own shard")


RULES: dict[str, Rule] = {
    "Shape": shape,
    "ShapeN": shapes,
    "Size": size,
    "Rank": rank,
    "Fill": fill,
    "Empty": empty,
    "BroadcastTo": broadcast_to,
    **dict.fromkeys(["OnesLike", "ZerosLike"], ones_like),
    **dict.fromkeys(["DynamicStitch", "ParallelDynamicStitch"], _of_shapes(stitch)),
    "ConcatOffset": concat_offsets,
    "BroadcastArgs": _of_shapes(broadcast_shapes),
    **dict.fromkeys(["Range", "LinSpace"], arange),
}
