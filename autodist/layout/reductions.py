"""Rules for reductions: over the batch axis they return sums and means, over other axes the rows remain."""

from __future__ import annotations

import functools

import numpy as np

from autodist.layout.combine import same_rows
from autodist.layout.entries import beside_segments, unsorted_segments
from autodist.layout.factors import NONE, power, times
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Dims,
    Extremum,
    Fact,
    Form,
    Sharded,
    Statistic,
    UnknownFact,
    form_of,
    with_axis,
)
from autodist.layout.kinds import ReducedBy
from autodist.layout.lengths import length
from autodist.layout.op_context import OpContext, Rule


def reduce_sum(ctx: OpContext) -> Fact:
    return _linear_reduction(ctx, is_mean=False)


def reduce_mean(ctx: OpContext) -> Fact:
    return _linear_reduction(ctx, is_mean=True)


def reduced(by: ReducedBy | None) -> Rule:
    """Returns a rule for Any, All and similar ops; `by` combines results over the batch, None: nothing can."""
    return functools.partial(_reduced, by=by)


def extreme(by: ReducedBy) -> Rule:
    """Returns a rule for Max and Min, which return equal lengths unchanged."""

    def apply(ctx: OpContext) -> Fact:
        counted = _equal_lengths(ctx)
        return _reduced(ctx, by) if counted is None else counted

    return apply


def _reduced(ctx: OpContext, by: ReducedBy | None) -> Fact:
    form = form_of(ctx.facts[0])
    if not isinstance(form, Form) or form.rows is None:
        return _without_rows(ctx, form)
    axes = _axes(ctx)
    if form.factors or axes is None:
        return ctx.unknown(_NO_SUM)
    return _reduction(ctx, form, by) if form.rows.axis in axes else _keep_rows(ctx, form, axes)


def _reduction(ctx: OpContext, form: Form, by: ReducedBy | None) -> Extremum | UnknownFact:
    no_sum = ctx.unknown(_NO_SUM)
    return no_sum if by is None else Extremum(by, no_sum.reason, form.mixed_at)


def _equal_lengths(ctx: OpContext) -> Dims | None:
    """Returns the maximum or minimum of several equal lengths; None if they may differ."""
    fact = ctx.facts[0]
    if not isinstance(fact, Dims) or not fact.forms:
        return None
    counted = {length(ctx, 0, element) for element in range(len(fact.forms))}
    return Dims(fact.forms[:1], fact.values[:1], True) if len(counted) == 1 and None not in counted else None


def reduce_product(ctx: OpContext) -> Fact:
    """Prod: of a shape's elements, a count; of anything else, like Max."""
    fact = ctx.facts[0]
    if not isinstance(fact, Dims) or any(form.base is not Base.REPLICATED for form in fact.forms):
        return _reduced(ctx, ReducedBy.PRODUCT)
    factors = NONE
    for form in fact.forms:
        factors = times(factors, form.factors)
    known = [value for value in fact.values if value is not None]
    value = int(np.prod(known)) if len(known) == len(fact.values) else None
    return Dims((Form(factors=factors),), (value,), True)


def half_squared_norm(ctx: OpContext) -> Fact:
    """L2Loss: half the sum of the squares of all elements."""
    form = ctx.form(0)
    if isinstance(form, Form) and form.rows is not None and not form.factors:
        return ctx.additive(Form(mixed_at=form.mixed_at))
    return _without_rows(ctx, form)


def of_segments(by: ReducedBy) -> Rule:
    """Returns a rule for UnsortedSegmentMax, Min and Prod: like sums of segments, but combined by `by`."""

    def apply(ctx: OpContext) -> Fact:
        result = sum_of_segments(ctx)
        if not isinstance(result, Form) or result.base is not Base.PARTIAL_SUM:
            return result
        return ctx.unknown(_NO_SUM) if result.factors else _reduction(ctx, result, by)

    return apply


def sum_of_segments(ctx: OpContext) -> Fact:
    """Segment sums: one row per example if segments are examples, else a sum over the batch for each segment.

    The latter requires segment ids with one meaning on all replicas.
    """
    of_examples = unsorted_segments(ctx)
    if of_examples is not None:
        return of_examples
    data, segments = ctx.form(0), ctx.form(1)
    if any(isinstance(fact, UnknownFact) for fact in (data, segments)):
        return ctx.unknown("its data or its segments are not known to be rows of examples")
    assert isinstance(data, Form) and isinstance(segments, Form)
    if segments == REPLICATED and data.rows is not None:
        return beside_segments(ctx, data, ctx.rank(1))
    number = ctx.dims(2) if len(ctx.facts) > 2 else None
    if number is None or not number.is_replicated:
        return ctx.unknown("the number of segments may differ between replicas")
    both_rows = data.rows is not None and segments.rows is not None and same_rows(data.rows, segments.rows)
    if both_rows and data.rows and data.rows.axis == 0 and not segments.factors:
        return Form(Base.PARTIAL_SUM, data.factors, data.mixed_at)
    return ctx.unknown("its data and its segments do not have the examples along the first axis")


def _linear_reduction(ctx: OpContext, is_mean: bool) -> Fact:
    form = form_of(ctx.facts[0])
    if not isinstance(form, Form) or form.rows is None:
        return _without_rows(ctx, form, is_linear=True)
    axes = _axes(ctx)
    if axes is None:
        return ctx.unknown("the reduced axes are not known")
    if form.rows.axis not in axes:
        return _keep_rows(ctx, form, axes)
    factors = times(form.factors, power(form.rows.count, 1), -1) if is_mean else form.factors
    reduced = Form(Base.PARTIAL_SUM, factors, form.mixed_at)
    return ctx.additive(reduced) if ctx.output_shape().rank == 0 else reduced


def _without_rows(ctx: OpContext, form: Form | Statistic | UnknownFact, is_linear: bool = False) -> Fact:
    """Reduces a layout without a batch axis: linear reductions keep sums, others only replicated values."""
    if isinstance(form, UnknownFact):
        return UnknownFact(form.reason)
    if isinstance(form, Statistic):
        return form
    if form.is_replicated:
        return form
    if not is_linear:
        reason = ctx.unknown("it is a function of sums or means over the batch that is neither a sum nor a mean").reason
        return Statistic(reason) if form.degree == 0 else UnknownFact(reason)
    if form.base is Base.PARTIAL_SUM and ctx.output_shape().rank == 0:
        return ctx.additive(form)
    return form


def _keep_rows(ctx: OpContext, form: Form, axes: set[int]) -> Fact:
    """Returns rows after a reduction over other axes."""
    assert isinstance(form.base, Sharded)
    if ctx.flag("keep_dims"):
        return form
    return with_axis(form, form.base.axis - sum(axis < form.base.axis for axis in axes))


def _axes(ctx: OpContext) -> set[int] | None:
    """Returns the reduced axes, counted from 0; None if they are not known."""
    rank = ctx.rank(0)
    if _is_all_axes(ctx):
        return set(range(rank)) if rank is not None else _every_axis(ctx)
    values = ctx.integers(1)
    if rank is None or values is None:
        return None
    axes = {value % rank for value in values if value is not None} if rank else set()
    return axes if None not in values else None


def _is_all_axes(ctx: OpContext) -> bool:
    """Returns True for `range(rank(x))`, which TensorFlow emits if the rank is unknown at graph construction."""
    node = ctx.scope.producer(ctx.inputs[1])
    if node is None or node.op != "Range":
        return False
    limit = ctx.scope.producer(node.input[1])
    start = ctx.scope.constant(node.input[0])
    return limit is not None and limit.op == "Rank" and start is not None and not np.any(start)


def _every_axis(ctx: OpContext) -> set[int]:
    form = form_of(ctx.facts[0])
    assert isinstance(form, Form) and form.rows is not None
    return {form.rows.axis}


_NO_SUM = "it reduces over the batch, which is neither a sum nor a mean"

RULES: dict[str, Rule] = {
    "Sum": reduce_sum,
    "Mean": reduce_mean,
    "Prod": reduce_product,
    "Max": extreme(ReducedBy.MAX),
    "Min": extreme(ReducedBy.MIN),
    "Any": reduced(ReducedBy.MAX),
    "All": reduced(ReducedBy.MIN),
    "EuclideanNorm": reduced(ReducedBy.NORM),
    "ArgMax": reduced(None),
    "ArgMin": reduced(None),
    "L2Loss": half_squared_norm,
    "UnsortedSegmentSum": sum_of_segments,
    "UnsortedSegmentMax": of_segments(ReducedBy.MAX),
    "UnsortedSegmentMin": of_segments(ReducedBy.MIN),
    "UnsortedSegmentProd": of_segments(ReducedBy.PRODUCT),
}
