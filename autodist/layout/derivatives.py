"""Rules for gradient ops, which occur in a loss that contains a gradient, such as a gradient penalty."""

from __future__ import annotations

from dataclasses import replace

from autodist.layout.arithmetic import factors_of, nonlinear
from autodist.layout.combine import has_rows, joined_rows, operands_of, same_rows
from autodist.layout.facts import REPLICATED, Base, Dims, Fact, Form, Sharded, UnknownFact, form_of, with_axis
from autodist.layout.movement import moving, pad
from autodist.layout.network import first_axis_by_itself
from autodist.layout.op_context import OpContext, Rule, op_names
from autodist.layout.shapes import batch_of
from autodist.layout.slices import strided_rows


def linear_in(incoming: int, other: int) -> Rule:
    """Returns a rule for an elementwise op that is linear in the incoming gradient, but not in the forward value."""

    def apply(ctx: OpContext) -> Fact:
        operands = operands_of(ctx)
        if not has_rows(operands) or factors_of(operands[other]):
            return nonlinear(ctx)
        joined = joined_rows(ctx, operands, (0, 1))
        return joined if isinstance(joined, UnknownFact) else replace(joined, factors=factors_of(operands[incoming]))

    return apply


def bias_gradient(ctx: OpContext) -> Fact:
    """BiasAddGrad: a sum over all axes except the channels."""
    form = ctx.form(0)
    if not isinstance(form, Form) or form.rows is None:
        return UnknownFact(form.reason) if isinstance(form, UnknownFact) else form
    channels = 1 if ctx.text("data_format") == "NCHW" else (ctx.rank(0) or 0) - 1
    if form.rows.axis == channels:
        return ctx.unknown("the examples lie along its channels")
    return Form(Base.PARTIAL_SUM, form.factors, form.mixed_at)


def filter_gradient(ctx: OpContext) -> Fact:
    """Conv2DBackpropFilter (value, sizes, gradient): a sum over the batch."""
    forms = ctx.forms(0, 2)
    if isinstance(forms, UnknownFact):
        return forms
    value, gradient = forms
    if value.rows is None or gradient.rows is None or not _same_examples(value.rows, gradient.rows):
        return ctx.unknown("its value and its gradient do not both have the examples along the first axis")
    if value.factors or form_of(ctx.facts[1]) != REPLICATED:
        return ctx.unknown("its value is scaled by sums over the batch")
    return Form(Base.PARTIAL_SUM, gradient.factors, value.mixed_at or gradient.mixed_at)


def _same_examples(left: Sharded, right: Sharded) -> bool:
    return left.axis == 0 and same_rows(left, right)


def pooling_gradient(ctx: OpContext) -> Fact:
    """MaxPoolGrad (value, result, gradient): linear in the gradient, independent along the first axis."""
    return _pooled(ctx, (0, 1), 2)


def average_gradient(ctx: OpContext) -> Fact:
    """AvgPoolGrad (shape of the value, gradient)."""
    sizes = ctx.dims(0)
    if sizes is None or not all(form.is_replicated for form in sizes.forms[1:]):
        return ctx.unknown("the shape of its value is not known")
    return _pooled(ctx, (), 1)


def _pooled(ctx: OpContext, values: tuple[int, ...], incoming: int) -> Fact:
    known = ctx.forms(*values, incoming)
    if isinstance(known, UnknownFact):
        return known
    gradient = known[-1]
    fits = all(form.rows and gradient.rows and _same_examples(form.rows, gradient.rows) for form in known)
    if not fits or any(form.factors for form in known[:-1]):
        return ctx.unknown("its inputs do not all have the examples along the first axis")
    return replace(gradient, mixed_at=next((form.mixed_at for form in known if form.mixed_at), None))


def enlarged_gradient(ctx: OpContext) -> Fact:
    """ResizeBilinearGrad, ResizeBicubicGrad (gradient, value): independent along the first axis."""
    return _pooled(ctx, (1,), 0)


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
    """FusedBatchNormGrad (gradient, value, scale, statistics): statistics are constants unless it is training."""
    known = ctx.forms(0, 1)
    others: list[Fact] = [REPLICATED] * 2
    if isinstance(known, UnknownFact):
        return [*[UnknownFact(known.reason)] * 3, *others]
    gradient, value = known
    if ctx.flag("is_training") or any(form_of(fact) != REPLICATED for fact in ctx.facts[2:5]):
        return [*[ctx.unknown("examples of a shard see one another in it")] * 3, *others]
    if gradient.rows is None or value.rows is None or value.factors or not _same_examples(gradient.rows, value.rows):
        why = "its value and its gradient do not both have the examples along the first axis"
        return [*[ctx.unknown(why)] * 3, *others]
    added = Form(Base.PARTIAL_SUM, gradient.factors, value.mixed_at or gradient.mixed_at)
    return [replace(gradient, mixed_at=added.mixed_at), added, added, *others]


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
    **dict.fromkeys(
        op_names("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad"), linear_in(0, 1)
    ),
    **dict.fromkeys(op_names("TanhGrad SigmoidGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad"), linear_in(1, 0)),
    **dict.fromkeys(["IgammaGradA", "RandomGammaGrad"], nonlinear),
    "BiasAddGrad": bias_gradient,
    **dict.fromkeys(["Conv2DBackpropFilter", "Conv3DBackpropFilterV2"], filter_gradient),
    "DepthwiseConv2dNativeBackpropFilter": filter_gradient,
    **dict.fromkeys(["MaxPoolGrad", "MaxPool3DGrad"], pooling_gradient),
    **dict.fromkeys(["AvgPoolGrad", "AvgPool3DGrad"], average_gradient),
    "MirrorPadGrad": moving(pad),
    "ResizeNearestNeighborGrad": first_axis_by_itself,
    **dict.fromkeys(["ResizeBilinearGrad", "ResizeBicubicGrad"], enlarged_gradient),
    "StridedSliceGrad": slice_gradient,
    **dict.fromkeys(["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"], normalised_gradient),
    "BroadcastGradientArgs": broadcast_axes,
}
