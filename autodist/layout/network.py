"""Rules for network layers and losses whose layouts do not follow from the op table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autodist.layout.by_factors import by_factors
from autodist.layout.combine import in_one_order, same_rows
from autodist.layout.distinct import row_by_row
from autodist.layout.factors import power, times
from autodist.layout.facts import REPLICATED, Base, Fact, Form, Recovery, Statistic, UnknownFact, form_of, with_axis
from autodist.layout.op_context import OpContext, Rule
from autodist.layout.permutations import sort_permutation


def top_k(ctx: OpContext) -> Fact | list[Fact]:
    """TopK: the largest elements along the last axis; along the batch axis, a permutation of the examples."""
    form = ctx.form(0)
    places = sort_permutation(ctx) if isinstance(form, Form) and form.rows is not None else None
    if places is not None:
        return [ctx.unknown("it sorts within the replica's shard of the batch"), places]
    return by_factors(ctx)


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
    if recovers and both[0].rows and both[0].rows.axis == 0:
        return replace(both[0], mixed_at=both[0].mixed_at or ctx.node.name)
    return UnknownFact(unknown.reason)


def batch_norm(ctx: OpContext) -> Fact | list[Fact]:
    """FusedBatchNorm: in training, examples of a shard interact through the statistics of the shard.

    They do not if each example has its own channels.
    The second output is the mean of the shard. The variance and the outputs reserved for the gradient are not means.
    """
    form = ctx.form(0)
    if isinstance(form, Form) and has_own_channels(ctx, form, range(1, 3 if ctx.flag("is_training") else 5)):
        own = with_axis(form, 0)
        return [form, *[own] * 4, ctx.unknown("it is reserved for the gradient")]
    if isinstance(form, UnknownFact) or not all(form_of(fact) == REPLICATED for fact in ctx.facts[1:]):
        reason = (
            form.reason if isinstance(form, UnknownFact) else ctx.unknown("its parameters are not replicated").reason
        )
        keeps = isinstance(form, UnknownFact) and form.recovery is Recovery.BATCH_SHAPED
        return [UnknownFact(reason, Recovery.BATCH_SHAPED if keeps else Recovery.NEVER), *[UnknownFact(reason)] * 5]
    if form.rows is None or form.rows.axis == channel_axis(ctx) or form.factors:
        return ctx.unknown("the examples lie along its channels, or its input is scaled by sums over the batch")
    if not ctx.flag("is_training"):
        return [form, *[REPLICATED] * 5]
    rows = replace(form, mixed_at=ctx.node.name)
    mean = Form(Base.PARTIAL_SUM, times(form.factors, power(form.rows.count, -1)), form.mixed_at)
    other = Statistic(ctx.unknown("it is a variance over the batch, which is no mean of variances").reason)
    return [rows, mean, *[other] * 4]


def channel_axis(ctx: OpContext) -> int:
    """Returns the axis of the channels of a fused batch normalisation."""
    return 1 if ctx.text("data_format").startswith("NC") else (ctx.rank(0) or 1) - 1


def has_own_channels(ctx: OpContext, value: Form, parameters: Iterable[int]) -> bool:
    """Returns True if each example has channels and parameters of its own, so that examples do not interact.

    This is the fused layer normalisation of tf_keras.

    Args:
        ctx: a fused batch normalisation, or its gradient.
        value: the normalised value.
        parameters: the operands with an element for each channel.
    """
    if value.rows is None or value.factors or value.rows.axis != channel_axis(ctx):
        return False
    forms = ctx.forms(*parameters)
    own = with_axis(value, 0).rows
    return not isinstance(forms, UnknownFact) and all(
        own is not None and f.rows is not None and not f.factors and same_rows(f.rows, own) for f in forms
    )


def quantize(ctx: OpContext) -> Fact | list[Fact]:
    """QuantizeAndDequantize: examples of a shard interact through a range that is computed from all of them."""
    form = ctx.form(0)
    if ctx.flag("range_given"):
        return row_by_row(by_factors)(ctx)
    if isinstance(form, Form) and form.rows is not None and form.rows.axis != ctx.number("axis") and not form.factors:
        return replace(form, mixed_at=ctx.node.name)
    return by_factors(ctx)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["TopK", "TopKV2"], top_k),
    **dict.fromkeys(["SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2"], sparse_cross_entropy),
    **dict.fromkeys(["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"], batch_norm),
    **dict.fromkeys(["QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3", "QuantizeAndDequantizeV4"], quantize),
}
