"""Rules for permutations of examples within a shard, as in mixup: each example meets another of its shard."""

from __future__ import annotations

from autodist.graph.ops import Trait, having
from autodist.layout.facts import REPLICATED, Fact, Form, Permutation, Positions, Recovery, reordered
from autodist.layout.lengths import is_length_of
from autodist.layout.op_context import OpContext, Rule
from autodist.layout.random_ops import are_drawn_alike


def shuffle(ctx: OpContext) -> Fact:
    """RandomShuffle, StatelessShuffle: permutes along the first axis."""
    fact = ctx.facts[0]
    if isinstance(fact, Positions) and fact.entries == fact.within:
        return Permutation(fact.within, ctx.named(), ctx.node.name)
    form = ctx.form(0)
    if form == REPLICATED:
        if ctx.node.op in having(Trait.BY_KEY) and are_drawn_alike(ctx):
            return REPLICATED
        return ctx.unknown("it shuffles into an order that each replica draws for itself", Recovery.ALWAYS)
    if isinstance(form, Form) and form.rows is not None:
        return reordered(form, ctx.named(), ctx.node.name) if form.rows.axis == 0 else form
    return ctx.unknown("it shuffles sums or means over the batch") if isinstance(form, Form) else form


def sort_permutation(ctx: OpContext) -> Permutation | None:
    """Returns the permutation that TopK makes of a whole vector over the batch, as in `argsort`; None for any other."""
    form = ctx.form(0)
    if isinstance(form, Form) and form.rows is not None and ctx.rank(0) == 1 and not form.factors:
        within = form.rows
        return Permutation(within, ctx.named(1), ctx.node.name) if is_length_of(ctx, 1, within) else None
    return None


def permuted_by(ctx: OpContext, order: Permutation) -> Fact:
    """Gathers by a permutation: of row indices, a permutation; of rows, permuted rows."""
    params = ctx.facts[0]
    if isinstance(params, Positions) and params.entries == params.within == order.within:
        return order
    if isinstance(params, Permutation) and params.within == order.within:
        return Permutation(order.within, ctx.named(), ctx.node.name)
    if isinstance(params, Form) and params.base == order.within:
        return reordered(params, order.key, order.node)
    return ctx.unknown("it takes rows by a permutation of other rows, or elements that are not rows of the batch")


def inverted(ctx: OpContext) -> Fact:
    """InvertPermutation."""
    fact = ctx.facts[0]
    if isinstance(fact, Permutation):
        return Permutation(fact.within, ctx.named(), ctx.node.name)
    return ctx.unknown("it inverts an unknown permutation")


RULES: dict[str, Rule] = {**dict.fromkeys(having(Trait.SHUFFLES), shuffle), "InvertPermutation": inverted}
