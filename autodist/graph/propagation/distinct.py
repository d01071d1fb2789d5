"""The different ids of a batch: each is looked up once, and every example takes what its ids have given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.facts import (
    SAME,
    Distinct,
    Fact,
    Form,
    Numbered,
    Numbers,
    Positions,
    UnknownFact,
    form_of,
)
from autodist.graph.propagation.op_context import OpContext, Rule


def unique(ctx: OpContext) -> list[Fact]:
    """Unique: the different ids, and for each id where it stands among them."""
    ids, number = ctx.form(0), 3 if ctx.node.op.endswith("Counts") or ctx.node.op == "UniqueWithCountsV2" else 2
    if not isinstance(ids, Form):
        return [UnknownFact(ids.reason)] * number
    if ids.is_same:
        return [SAME] * number
    if ids.rows is None or ids.factors or ctx.rank(0) != 1:
        return [ctx.opaque("its ids are not those of examples, one after the other")] * number
    of = ctx.named(1)
    counts: Fact = ctx.opaque("how often each different id comes in a part of the batch")
    found: list[Fact] = [Distinct(of), Numbers(of, ids), counts]
    return found[:number]


def looked_up(ctx: OpContext) -> Fact | None:
    """A gather by different ids, or of what was gathered by them; None where it is neither."""
    params, ids = ctx.facts[0], ctx.facts[1]
    if isinstance(params, Distinct) and isinstance(ids, Numbers) and ids.of == params.of:
        return ids.rows
    if isinstance(ids, Distinct) and form_of(params) == SAME:
        return ids
    return None


def numbers(rule: Callable[[OpContext], Fact]) -> Callable[[OpContext], Fact]:
    """A rule for ops that move elements, for numbers of different ids or of rows too: they are moved as rows are."""

    def apply(ctx: OpContext) -> Fact:
        found = ctx.facts[0]
        if not isinstance(found, Numbers | Numbered):
            return rule(ctx)
        moved = rule(replace(ctx, facts=[found.rows, *ctx.facts[1:]]))
        if not isinstance(moved, Form):
            return moved
        if isinstance(found, Numbers):
            return Numbers(found.of, moved)
        is_vector = ctx.output_shape().rank == 1 and moved.rows is not None and not moved.rows.order
        return (
            Positions(found.within, moved.rows, found.covers)
            if is_vector and moved.rows
            else replace(found, rows=moved)
        )

    return apply


def row_by_row(rule: Rule) -> Rule:
    """A rule for arithmetic element by element, for the different ids' rows too where all else is one number."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        different = {fact for fact in ctx.facts if isinstance(fact, Distinct)}
        others = [index for index, fact in enumerate(ctx.facts) if not isinstance(fact, Distinct)]
        if len(different) == 1 and all(ctx.facts[i] == SAME and ctx.rank(i) == 0 for i in others):
            return different.pop()
        return rule(ctx)

    return apply


RULES: dict[str, Rule] = {
    **dict.fromkeys(having(Trait.UNIQUE | Trait.UNIQUE_COUNTED), unique),
}
