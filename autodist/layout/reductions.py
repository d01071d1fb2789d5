"""Rules for reductions of shapes, and for reductions of segments."""

from __future__ import annotations

import numpy as np

from autodist.layout.by_factors import by_factors
from autodist.layout.entries import unsorted_segments
from autodist.layout.factors import NONE, times
from autodist.layout.facts import Base, Dims, Fact, Form
from autodist.layout.lengths import length
from autodist.layout.op_context import OpContext, Rule


def extreme(ctx: OpContext) -> Fact | list[Fact]:
    """Max, Min: of equal lengths, the length."""
    counted = _equal_lengths(ctx)
    return by_factors(ctx) if counted is None else counted


def _equal_lengths(ctx: OpContext) -> Dims | None:
    """Returns the maximum or minimum of several equal lengths; None if they may differ."""
    fact = ctx.facts[0]
    if not isinstance(fact, Dims) or not fact.forms:
        return None
    counted = {length(ctx, 0, element) for element in range(len(fact.forms))}
    return Dims(fact.forms[:1], fact.values[:1], True) if len(counted) == 1 and None not in counted else None


def reduce_product(ctx: OpContext) -> Fact | list[Fact]:
    """Prod: of a shape's elements, a count."""
    fact = ctx.facts[0]
    if not isinstance(fact, Dims) or any(form.base is not Base.REPLICATED for form in fact.forms):
        return by_factors(ctx)
    factors = NONE
    for form in fact.forms:
        factors = times(factors, form.factors)
    known = [value for value in fact.values if value is not None]
    value = int(np.prod(known)) if len(known) == len(fact.values) else None
    return Dims((Form(factors=factors),), (value,), True)


def of_segments(ctx: OpContext) -> Fact | list[Fact]:
    """Unsorted segment reductions: one row per example if segments are examples.

    Otherwise each replica reduces its part of each segment. This requires segment ids with one meaning on all replicas.
    """
    of_examples = unsorted_segments(ctx)
    if of_examples is not None:
        return of_examples
    number = ctx.dims(2)
    if number is None or not number.is_replicated:
        return ctx.unknown("the number of segments may differ between replicas")
    return by_factors(ctx)


RULES: dict[str, Rule] = {
    "Prod": reduce_product,
    **dict.fromkeys(["Max", "Min"], extreme),
    **dict.fromkeys(
        ["UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"], of_segments
    ),
}
