"""Rules for gradient ops, which occur in a loss that contains a gradient, such as a gradient penalty."""

from __future__ import annotations

from dataclasses import replace

from autodist.layout.by_factors import nonlinear
from autodist.layout.combine import same_rows
from autodist.layout.facts import REPLICATED, Base, Dims, Fact, Form, UnknownFact, form_of, with_axis
from autodist.layout.network import has_own_channels
from autodist.layout.op_context import OpContext, Rule
from autodist.layout.shapes import batch_of
from autodist.layout.slices import strided_rows


def slice_gradient(ctx: OpContext) -> Fact:
    """StridedSliceGrad (shape of the value, begin, end, strides, gradient): zeros outside the slice."""
    gradient, dims = ctx.form(4), ctx.dims(0)
    if isinstance(gradient, UnknownFact):
        return gradient
    if gradient.rows is None and all(known is not None and known.is_replicated for known in map(ctx.dims, range(4))):
        return gradient  # placed among zeros
    batch = batch_of(dims) if dims is not None else None
    if dims is None or batch is None or gradient.rows is None or batch.count != gradient.rows.count:
        return nonlinear(ctx) if gradient.rows is None else ctx.unknown("the shape of its value is not known")
    unsliced = with_axis(gradient, batch.axis)
    assert unsliced.rows is not None
    taken = strided_rows(ctx, unsliced, unsliced.rows, len(dims.forms))
    if isinstance(taken, Form) and taken.rows != gradient.rows:
        return ctx.unknown("its gradient does not have the examples along the same axis as the slice")
    return unsliced if isinstance(taken, Form) else taken


def normalised_gradient(ctx: OpContext) -> list[Fact]:
    """FusedBatchNormGrad (gradient, value, scale, statistics): in training, examples interact, as in `batch_norm`.

    The statistics are then those of the shard; otherwise, they are constants.
    """
    known, is_training = ctx.forms(0, 1), ctx.flag("is_training")
    others: list[Fact] = [REPLICATED] * 2
    if isinstance(known, UnknownFact):
        return [*[UnknownFact(known.reason)] * 3, *others]
    gradient, value = known
    if (
        gradient.rows is not None
        and value.rows is not None
        and same_rows(gradient.rows, value.rows)
        and has_own_channels(ctx, value, range(2, 3 if is_training else 5))
    ):
        own = with_axis(gradient, 0)
        return [gradient, own, own, *others]
    if any(form_of(fact) != REPLICATED for fact in ctx.facts[2 : 3 if is_training else 5]):
        return [*[ctx.unknown("its parameters are not replicated")] * 3, *others]
    if (
        gradient.rows is None
        or value.rows is None
        or value.factors
        or gradient.rows.axis
        or not same_rows(gradient.rows, value.rows)
    ):
        why = "its value and its gradient do not both have the examples along the first axis"
        return [*[ctx.unknown(why)] * 3, *others]
    mixed_at = ctx.node.name if is_training else value.mixed_at or gradient.mixed_at
    added = Form(Base.PARTIAL_SUM, gradient.factors, mixed_at)
    return [replace(gradient, mixed_at=mixed_at), added, added, *others]


def broadcast_axes(ctx: OpContext) -> list[Fact]:
    """BroadcastGradientArgs: for each of two shapes, the axes along which it was broadcast to the other."""
    left, right = ctx.dims(0), ctx.dims(1)
    if left is None or right is None:
        are_same = all(form_of(fact) == REPLICATED for fact in ctx.facts)
        return [REPLICATED if are_same else ctx.unknown("the shapes that were broadcast are not known")] * 2
    return [_axes_of(ctx, left, right), _axes_of(ctx, right, left)]


def _axes_of(ctx: OpContext, dims: Dims, other: Dims) -> Fact:
    axes = _repeated(dims, other)
    if axes is None:
        return ctx.unknown("the broadcast axes depend on lengths that are not known")
    return Dims((REPLICATED,) * len(axes), tuple(axes))


def _repeated(dims: Dims, other: Dims) -> list[int] | None:
    """Returns the axes of the common shape along which `dims` was broadcast; None if unknown."""
    rank = max(len(dims.forms), len(other.forms))
    axes: list[int] = []
    for axis in range(rank):
        at, there = axis - rank + len(dims.forms), axis - rank + len(other.forms)
        if at < 0:
            axes.append(axis)
        elif there >= 0:
            repeated = _is_repeated(dims, at, other, there)
            if repeated is None:
                return None
            axes += [axis] if repeated else []
    return axes


def _is_repeated(dims: Dims, at: int, other: Dims, there: int) -> bool | None:
    if other.forms[there] == REPLICATED and other.values[there] == 1:
        return False
    if dims.forms[at] == REPLICATED and dims.values[at] is not None:
        if dims.values[at] != 1:
            return False
        return None if other.forms[there] == REPLICATED and other.values[there] is None else True
    return False if dims.forms[at] != REPLICATED and dims.forms[at] == other.forms[there] else None


RULES: dict[str, Rule] = {
    "StridedSliceGrad": slice_gradient,
    **dict.fromkeys(["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"], normalised_gradient),
    "BroadcastGradientArgs": broadcast_axes,
}
