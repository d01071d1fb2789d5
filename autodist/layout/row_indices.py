"""Row indices within a replica's shard: they cannot be combined themselves, but values gathered by them may be."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.names import data_inputs
from autodist.graph.ops import Trait, having
from autodist.layout.combine import same_rows
from autodist.layout.facts import (
    REPLICATED,
    Coordinates,
    Fact,
    Form,
    Positions,
    Sharded,
    UnknownFact,
    elements_of,
    form_of,
)
from autodist.layout.lengths import length
from autodist.layout.op_context import OpContext, Rule, op_names, tensor_name


def all_rows(ctx: OpContext) -> Positions | None:
    """Returns the row indices made by `range(shape(x)[0])`: all rows of x; None for any other range."""
    if not ctx.is_zero(0) or ctx.scalar(2) != 1:
        return None
    within = length(ctx, 1)
    return Positions(within, within, True) if isinstance(within, Sharded) and within.per is not None else None


def numbers_all(positions: Positions, form: Fact) -> bool:
    """Returns True if positions cover all rows of a tensor whose rows lie along its first axis."""
    return isinstance(form, Form) and positions.entries == positions.within == form.base


def element_of_each(ctx: OpContext) -> Fact | None:
    """GatherNd of [row index, …]: from each example, the element selected by the other columns; None for others."""
    params, columns = ctx.form(0), _columns(ctx, ctx.inputs[1])
    if not columns or not isinstance(params, Form) or not isinstance(columns[0], Positions):
        return None
    if params.factors or ctx.rank(1) != 2 or ctx.number("batch_dims") or not numbers_all(columns[0], params):
        return None
    others = [form_of(fact) for fact in columns[1:]]
    for form in others:
        if not isinstance(form, Form) or form.factors or form.base != params.base:
            return None
    return params


def _columns(ctx: OpContext, tensor: str) -> list[Fact]:
    """Returns the facts of the columns of a matrix assembled from columns; empty for any other matrix."""
    node = ctx.scope.producer(tensor)
    if node is None:
        return []
    sources = data_inputs(node)
    if node.op == "Pack" and node.attr["axis"].i in (1, -1):
        return [ctx.scope.fact(name) for name in sources if ctx.scope.shape(name).rank == 1]
    axis = ctx.scope.constant(sources[-1]) if node.op == "ConcatV2" else None
    if axis is not None and int(axis) in (1, -1):
        return [ctx.scope.fact(name) for name in sources[:-1]]
    return []


def crop_of_each(ctx: OpContext) -> Fact:
    """CropAndResize (images, boxes, image index of each box)."""
    images, boxes, numbers = ctx.form(0), ctx.form(1), ctx.facts[2]
    for form in (images, boxes):
        if isinstance(form, UnknownFact):
            return UnknownFact(form.reason)
    assert isinstance(boxes, Form)
    if isinstance(numbers, Positions) and numbers_all(numbers, images) and boxes.rows is not None:
        alike = (boxes.rows.axis, boxes.rows.count, boxes.rows.order) == (0, numbers.entries.count, ())
        if alike and not boxes.factors and isinstance(images, Form) and not images.factors:
            return replace(images, mixed_at=images.mixed_at or boxes.mixed_at)
    return ctx.unknown("it selects images by position within the shard")


def divide(ctx: OpContext) -> Fact | list[Fact]:
    """DynamicPartition: the rows of each class, or their indices, as a mask would select them."""
    numbers, classes, number = ctx.facts[0], ctx.form(1), ctx.number("num_partitions")
    data = Form(numbers.entries) if isinstance(numbers, Positions) else ctx.form(0)
    for form in (data, classes):
        if isinstance(form, UnknownFact):
            return UnknownFact(form.reason)
    assert isinstance(data, Form) and isinstance(classes, Form)
    fits = data.rows is not None and classes.rows is not None and same_rows(data.rows, classes.rows)
    if not fits or data.rows is None or data.rows.axis != 0 or ctx.rank(1) != 1 or classes.factors:
        return ctx.unknown("its rows and their classes do not both have the examples along the first axis")
    if data.rows.order:
        return ctx.unknown("its rows are not in the order of the examples")
    parts = [_of_class(ctx, number, k) for k in range(number)]
    if isinstance(numbers, Positions):
        return [Positions(numbers.within, part) for part in parts]
    return [Form(part, data.factors, data.mixed_at or classes.mixed_at) for part in parts]


def _of_class(ctx: OpContext, number: int, index: int) -> Sharded:
    """Returns the rows of a class; they are equal for all tensors partitioned by the same classes."""
    return elements_of(ctx.scope.same_as(("class", ctx.inputs[1], number, index), ctx.named(index)))


def put_back(ctx: OpContext) -> Form | None:
    """DynamicStitch of per-class results by row indices: all rows, in their original order."""
    half = len(ctx.facts) // 2
    within = _partitioned_rows(ctx, half)
    if within is None:
        return None
    values = [ctx.form(k) for k in range(half, 2 * half)]
    for numbers, form in zip(ctx.facts[:half], values, strict=True):
        if not isinstance(numbers, Positions) or not isinstance(form, Form) or form.base != numbers.entries:
            return None
    forms = [form for form in values if isinstance(form, Form)]
    if len({form.factors for form in forms}) != 1:
        return None
    return Form(within, forms[0].factors, next((form.mixed_at for form in forms if form.mixed_at), None))


def _partitioned_rows(ctx: OpContext, number: int) -> Sharded | None:
    """Returns the rows whose indices are the first inputs: all classes of one DynamicPartition, in its order."""
    sources = [_origin(ctx, tensor) for tensor in ctx.inputs[:number]]
    node = ctx.scope.producer(sources[0])
    is_whole = node is not None and node.op == "DynamicPartition" and node.attr["num_partitions"].i == number
    if node is None or not is_whole or sources != [f"{node.name}:{k}" for k in range(number)]:
        return None
    divided = ctx.scope.fact(tensor_name(node.input[0]))
    is_all = isinstance(divided, Positions) and divided.covers and divided.entries == divided.within
    return divided.within if isinstance(divided, Positions) and is_all else None


def _origin(ctx: OpContext, tensor: str) -> str:
    while (node := ctx.scope.producer(tensor)) is not None and node.op in having(Trait.IDENTITY):
        tensor = tensor_name(node.input[0])
    return tensor


def scatter_beside(ctx: OpContext) -> Fact:
    """TensorScatterAdd and similar ops: scatters into rows of examples at positions equal for all examples.

    The indices refer to the first axes. The batch axis follows them, in the tensor and in the updates.
    """
    if isinstance(ctx.facts[1], Positions | Coordinates):
        return _scatter_within_examples(ctx, ctx.facts[1])
    forms, indices, rank = ctx.forms(0, 1, 2), ctx.shape(1), ctx.rank(1)
    if isinstance(forms, UnknownFact):
        return forms
    tensor, places, updates = forms
    depth = indices[-1] if rank else None
    if places != REPLICATED or depth is None or rank is None or tensor.rows is None or updates.rows is None:
        return ctx.unknown("it scatters to positions that are not known to be equal for all examples")
    moved = replace(updates.rows, axis=updates.rows.axis - (rank - 1) + depth)
    behind = tensor.rows.axis >= depth and updates.rows.axis >= rank - 1
    if not behind or not same_rows(tensor.rows, moved) or tensor.factors or updates.factors:
        return ctx.unknown("its updates do not have the examples along the axis of the tensor")
    return replace(tensor, mixed_at=tensor.mixed_at or updates.mixed_at)


def _scatter_within_examples(ctx: OpContext, places: Positions | Coordinates) -> Fact:
    """Scatters updates to the positions of a mask over the same rows: each into its own example's row."""
    forms = ctx.forms(0, 2)
    if isinstance(forms, UnknownFact):
        return forms
    tensor, updates = forms
    positions = places.positions if isinstance(places, Coordinates) else places
    is_own = tensor.base == positions.within and updates.base == positions.entries and ctx.rank(1) == 2
    if not is_own or tensor.factors or updates.factors:
        return ctx.unknown("it scatters to rows by position within the shard")
    return replace(tensor, mixed_at=tensor.mixed_at or updates.mixed_at)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        op_names("TensorScatterAdd TensorScatterSub TensorScatterUpdate TensorScatterMax TensorScatterMin"),
        scatter_beside,
    ),
    "CropAndResize": crop_of_each,
    "DynamicPartition": divide,
}
