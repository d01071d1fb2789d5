"""Rules for image ops and other ops whose first axis is the batch axis."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.names import data_inputs
from autodist.graph.ops import Trait, having
from autodist.layout.by_factors import by_factors
from autodist.layout.combine import operands_of, same_rows
from autodist.layout.entries import row_lengths
from autodist.layout.facts import REPLICATED, Base, Fact, Form, Positions, UnknownFact, form_of
from autodist.layout.op_context import OpContext, Rule


def pool_with_positions(ctx: OpContext) -> list[Fact]:
    """MaxPoolWithArgmax: values, and their positions within each image or within the whole shard."""
    values = by_factors(ctx)
    if isinstance(values, list):
        return [values[0], ctx.unknown("it returns positions within the replica's shard of the batch")]
    return [values, values]


def count_values(ctx: OpContext) -> Fact:
    """DenseBincount: counts per row of a matrix; for a vector, counts over the batch, or per example of the entries."""
    if isinstance(ctx.facts[0], Positions):
        return row_lengths(ctx)
    values = ctx.form(0)
    weights = operands_of(ctx, (2,))[0]
    if isinstance(values, UnknownFact):
        return UnknownFact(values.reason)
    if values.rows is None or values.rows.axis != 0 or values.factors:
        return ctx.unknown("its values do not have the examples along the first axis")
    if form_of(ctx.facts[1]) != REPLICATED and not _is_bounded(ctx, ctx.inputs[1]):
        return ctx.unknown("the number of bins may differ between replicas")
    has_none = ctx.shape(2).num_elements() == 0
    are_rows = isinstance(weights, Form) and weights.rows is not None and same_rows(weights.rows, values.rows)
    if not isinstance(weights, Form) or not (are_rows or (weights.is_replicated and has_none)):
        return ctx.unknown("its weights do not belong to the same examples")
    if ctx.rank(0) == 2:
        return replace(values, factors=weights.factors, mixed_at=values.mixed_at or weights.mixed_at)
    if ctx.rank(0) == 1 and not ctx.flag("binary_output"):
        return Form(Base.PARTIAL_SUM, weights.factors, values.mixed_at or weights.mixed_at)
    return ctx.unknown("it checks which values occur in the batch, which is neither a sum nor a mean")


def histogram(ctx: OpContext) -> Fact:
    """HistogramFixedWidth (values, range, number of bins): counts over the batch."""
    values = ctx.form(0)
    if isinstance(values, UnknownFact):
        return UnknownFact(values.reason)
    if any(form_of(fact) != REPLICATED for fact in ctx.facts[1:]):
        return ctx.unknown("its range or its number of bins may differ between replicas")
    if values.factors or (values.rows is None and not values.is_replicated):
        return ctx.unknown("its values do not belong to examples")
    return values if values.is_replicated else Form(Base.PARTIAL_SUM, mixed_at=values.mixed_at)


def _is_bounded(ctx: OpContext, tensor: str) -> bool:
    """Returns True for `minimum(maximum(x, n), n)`, whose value is always n."""
    bounds: dict[str, list[int]] = {"Minimum": [], "Maximum": []}
    passes = having(Trait.IDENTITY | Trait.CASTS)
    node = ctx.scope.producer(tensor)
    while node is not None and (node.op in bounds or node.op in passes):
        sources = data_inputs(node)
        known = [value for value in map(ctx.scope.constant, sources) if value is not None]
        if node.op in bounds and len(known) == 1:
            bounds[node.op] += [int(known[0])]
        others = [name for name in sources if ctx.scope.constant(name) is None]
        node = ctx.scope.producer(others[0]) if others else None
    return len(bounds["Minimum"]) == 1 and bounds["Minimum"] == bounds["Maximum"]


RULES: dict[str, Rule] = {
    "MaxPoolWithArgmax": pool_with_positions,
    "DenseBincount": count_values,
    "HistogramFixedWidth": histogram,
}
