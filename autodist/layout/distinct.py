"""Rules for lookups of distinct ids: each id is looked up once, and every example gathers the rows of its ids."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.layout.facts import (
    REPLICATED,
    DistinctIndices,
    DistinctRows,
    Fact,
    Form,
    Positions,
    RowIndices,
    UnknownFact,
    form_of,
)
from autodist.layout.op_context import OpContext, Rule


def unique(ctx: OpContext) -> list[Fact]:
    """Unique: the distinct ids, and the index of each id among them."""
    ids, number = ctx.form(0), 3 if ctx.node.op.endswith("Counts") or ctx.node.op == "UniqueWithCountsV2" else 2
    if not isinstance(ids, Form):
        return [UnknownFact(ids.reason)] * number
    if ids.is_replicated:
        return [REPLICATED] * number
    if ids.rows is None or ids.factors or ctx.rank(0) != 1:
        return [ctx.unknown("its ids do not belong to examples in their order")] * number
    of = ctx.named(1)
    counts: Fact = ctx.unknown("it counts each distinct id within a shard of the batch")
    results: list[Fact] = [DistinctRows(of), DistinctIndices(of, ids), counts]
    return results[:number]


def looked_up(ctx: OpContext) -> Fact | None:
    """Gather by distinct ids, or from rows that were gathered by them; None for any other gather."""
    params, ids = ctx.facts[0], ctx.facts[1]
    if isinstance(params, DistinctRows) and isinstance(ids, DistinctIndices) and ids.of == params.of:
        return ids.rows
    if isinstance(ids, DistinctRows) and form_of(params) == REPLICATED:
        return ids
    return None


def numbers(rule: Rule) -> Rule:
    """Extends a rule that moves elements to indices of distinct ids or of rows, which move like rows."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        indices = ctx.facts[0]
        if not isinstance(indices, DistinctIndices | RowIndices):
            return rule(ctx)
        moved = rule(replace(ctx, facts=[indices.rows, *ctx.facts[1:]]))
        if not isinstance(moved, Form):
            return moved
        if isinstance(indices, DistinctIndices):
            return DistinctIndices(indices.of, moved)
        is_vector = ctx.output_shape().rank == 1 and moved.rows is not None and not moved.rows.order
        return (
            Positions(indices.within, moved.rows, indices.covers)
            if is_vector and moved.rows
            else replace(indices, rows=moved)
        )

    return apply


def row_by_row(rule: Rule) -> Rule:
    """Extends a rule for elementwise arithmetic to the distinct ids' rows if all other operands are scalars."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        different = {fact for fact in ctx.facts if isinstance(fact, DistinctRows)}
        others = [index for index, fact in enumerate(ctx.facts) if not isinstance(fact, DistinctRows)]
        if len(different) == 1 and all(ctx.facts[i] == REPLICATED and ctx.rank(i) == 0 for i in others):
            return different.pop()
        return rule(ctx)

    return apply


RULES: dict[str, Rule] = {
    **dict.fromkeys(having(Trait.UNIQUE | Trait.UNIQUE_COUNTED), unique),
}
