"""Rules for neural network layers and fused losses, whose batch axis is the first."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops import linear_operands
from autodist.layout.arithmetic import nonlinear
from autodist.layout.combine import in_one_order, weakest
from autodist.layout.factors import power, times
from autodist.layout.facts import REPLICATED, Base, Fact, Form, Recovery, Statistic, UnknownFact, form_of, is_noise
from autodist.layout.op_context import OpContext, Rule, op_names
from autodist.layout.permutations import sort_permutation


def is_replicated_or_noise(fact: Fact) -> bool:
    """Returns True if a parameter is equal for all examples of a shard: replicated, or noise drawn once per replica."""
    return form_of(fact) == REPLICATED or is_noise(fact)


def first_axis_by_itself(ctx: OpContext) -> Fact:
    """Convolutions and pooling: independent along the first axis, with replicated parameters."""
    form = ctx.form(0)
    if isinstance(form, UnknownFact):
        return form if all(form_of(fact) == REPLICATED for fact in ctx.facts[1:]) else UnknownFact(form.reason)
    if not all(map(is_replicated_or_noise, ctx.facts[1:])):
        return ctx.unknown("its parameters are not replicated")
    if form.rows is None:
        return form if form.is_replicated else ctx.unknown("its input is a sum or mean over the batch")
    linear = linear_operands(ctx.node.op, len(ctx.inputs)) is not None
    if form.rows.axis == 0 and (linear or not form.factors):
        return form
    return ctx.unknown("the examples are not along its first axis")


def transposed_convolution(ctx: OpContext) -> Fact:
    """Conv2DBackpropInput as a layer (sizes, filter, input)."""
    sizes, value = ctx.dims(0), ctx.form(2)
    if isinstance(value, UnknownFact):
        return UnknownFact(value.reason)
    fits = ctx.facts[1] == REPLICATED and value.rows is not None and value.rows.axis == 0
    if fits and sizes is not None and all(form.is_replicated for form in sizes.forms[1:]):
        return value
    return ctx.unknown("its filter or sizes are not replicated, or the examples are not along its first axis")


def along_last_axis(ctx: OpContext) -> Fact | list[Fact]:
    """Softmax and similar ops: a function of each row along the last axis."""
    form, rank = ctx.form(0), ctx.rank(0)
    if isinstance(form, Form) and form.rows is not None:
        if rank is None or form.rows.axis == rank - 1:
            return ctx.unknown("it runs along the batch axis, or its input's rank is not known")
        if not all(map(is_replicated_or_noise, ctx.facts[1:])):
            return ctx.unknown("its parameters are not replicated")
    return nonlinear(ctx, [0])


def top_k(ctx: OpContext) -> Fact | list[Fact]:
    """TopK: the largest elements along the last axis; along the batch axis, a permutation of the examples."""
    form = ctx.form(0)
    places = sort_permutation(ctx) if isinstance(form, Form) and form.rows is not None else None
    if places is not None:
        return [ctx.unknown("it sorts within the replica's shard of the batch"), places]
    return along_last_axis(ctx)


def bias_add(ctx: OpContext) -> Fact:
    """BiasAdd: the bias lies along the channels."""
    value, bias = ctx.form(0), ctx.form(1)
    if isinstance(value, UnknownFact) or isinstance(bias, UnknownFact):
        return weakest([value, bias]) or ctx.unknown("its input is not known")
    if value.rows is None:
        return (
            REPLICATED
            if value.is_replicated and bias.is_replicated
            else ctx.unknown("it adds a bias to a sum over the batch")
        )
    channels = 1 if ctx.text("data_format") == "NCHW" else (ctx.rank(0) or 0) - 1
    if bias.is_replicated and not value.factors and value.rows.axis != channels:
        return value
    return ctx.unknown("its bias lies along the batch, or its input is scaled by sums over the batch")


def cross_entropy(ctx: OpContext) -> Fact:
    """SoftmaxCrossEntropyWithLogits: two inputs of [examples, classes]; returns losses of [examples], and gradients."""
    joined = nonlinear(ctx, [0, 1])
    if isinstance(joined, Form) and joined.rows is not None and joined.rows.axis != 0:
        return ctx.unknown("the examples are not along its first axis")
    return joined


def sparse_cross_entropy(ctx: OpContext) -> Fact:
    """SparseSoftmaxCrossEntropyWithLogits, InTopK: inputs of [examples, classes] and [examples]."""
    first, second = ctx.form(0), ctx.form(1)
    if first == REPLICATED and second == REPLICATED:
        return REPLICATED
    for form in (first, second):
        if isinstance(form, Form) and (form.factors or form.base is Base.PARTIAL_SUM):
            return ctx.unknown("it is not linear in a sum over the batch")
    both = [form for form in (first, second) if isinstance(form, Form) and form.rows is not None]
    if len(both) == 2:
        paired = in_one_order(*(form.rows for form in both if form.rows is not None))
        if paired is not None and paired[0].axis == 0:
            return Form(paired[0], mixed_at=both[0].mixed_at or both[1].mixed_at or paired[1])
    unknown = next((form for form in (first, second) if isinstance(form, UnknownFact)), None)
    if unknown is None:
        return ctx.unknown("its inputs do not both have the examples along the first axis")
    recovers = unknown.recovery is Recovery.BATCH_SHAPED and len(both) == 1
    return both[0] if recovers and both[0].rows and both[0].rows.axis == 0 else UnknownFact(unknown.reason)


def batch_norm(ctx: OpContext) -> Fact | list[Fact]:
    """FusedBatchNorm: in training, examples of a shard interact through the statistics of the shard.

    The second output is the mean of the shard. The variance and the outputs reserved for the gradient are not means.
    """
    form = ctx.form(0)
    if isinstance(form, UnknownFact) or not all(form_of(fact) == REPLICATED for fact in ctx.facts[1:]):
        reason = (
            form.reason if isinstance(form, UnknownFact) else ctx.unknown("its parameters are not replicated").reason
        )
        keeps = isinstance(form, UnknownFact) and form.recovery is Recovery.BATCH_SHAPED
        return [UnknownFact(reason, Recovery.BATCH_SHAPED if keeps else Recovery.NEVER), *[UnknownFact(reason)] * 5]
    channels = 1 if ctx.text("data_format").startswith("NC") else (ctx.rank(0) or 1) - 1
    if form.rows is None or form.rows.axis == channels or form.factors:
        return ctx.unknown("the examples lie along its channels, or its input is scaled by sums over the batch")
    if not ctx.flag("is_training"):
        return [form, *[REPLICATED] * 5]
    rows = replace(form, mixed_at=ctx.node.name)
    mean = Form(Base.PARTIAL_SUM, times(form.factors, power(form.rows.count, -1)), form.mixed_at)
    other = Statistic(ctx.unknown("it is a variance over the batch, which is no mean of variances").reason)
    return [rows, mean, *[other] * 4]


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        op_names(
            "Conv Conv1D Conv2D Conv3D DepthwiseConv2dNative Dilation2D MaxPool MaxPoolV2 MaxPool3D AvgPool AvgPool3D "
            "LRN ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea AdjustContrastv2 DepthToSpace "
            "SpaceToDepth"
        ),
        first_axis_by_itself,
    ),
    **dict.fromkeys(
        ["Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"], transposed_convolution
    ),
    **dict.fromkeys(["Softmax", "LogSoftmax"], along_last_axis),
    **dict.fromkeys(["TopK", "TopKV2"], top_k),
    **dict.fromkeys(["BiasAdd", "BiasAddV1"], bias_add),
    "SoftmaxCrossEntropyWithLogits": cross_entropy,
    **dict.fromkeys(["SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2"], sparse_cross_entropy),
    **dict.fromkeys(["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"], batch_norm),
}
