"""Rules for permutations of examples within a shard, as in mixup: each example meets another of its shard."""

from __future__ import annotations

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.facts import SAME, Fact, Form, Positions, Recovery, Shuffled, reordered
from autodist.graph.propagation.lengths import is_length_of
from autodist.graph.propagation.op_context import OpContext, Rule
from autodist.graph.propagation.random_ops import are_drawn_alike


def shuffle(ctx: OpContext) -> Fact:
    """RandomShuffle, StatelessShuffle: permutes along the first axis."""
    fact = ctx.facts[0]
    if isinstance(fact, Positions) and fact.entries == fact.within:
        return Shuffled(fact.within, ctx.named(), ctx.node.name)
    form = ctx.form(0)
    if form == SAME:
        if ctx.node.op in having(Trait.BY_KEY) and are_drawn_alike(ctx):
            return SAME
        return ctx.opaque("it shuffles into an order that each replica draws for itself", Recovery.ALWAYS)
    if isinstance(form, Form) and form.rows is not None:
        return reordered(form, ctx.named(), ctx.node.name) if form.rows.axis == 0 else form
    return ctx.opaque("it shuffles sums or means over the batch") if isinstance(form, Form) else form


def sorted_places(ctx: OpContext) -> Shuffled | None:
    """Returns the permutation that TopK makes of a whole vector over the batch, as in `argsort`; None for any other."""
    form = ctx.form(0)
    if isinstance(form, Form) and form.rows is not None and ctx.rank(0) == 1 and not form.factors:
        within = form.rows
        return Shuffled(within, ctx.named(1), ctx.node.name) if is_length_of(ctx, 1, within) else None
    return None


def in_order_of(ctx: OpContext, order: Shuffled) -> Fact:
    """Gathers by a permutation: of row indices, a permutation; of rows, permuted rows."""
    params = ctx.facts[0]
    if isinstance(params, Positions) and params.entries == params.within == order.within:
        return order
    if isinstance(params, Shuffled) and params.within == order.within:
        return Shuffled(order.within, ctx.named(), ctx.node.name)
    if isinstance(params, Form) and params.base == order.within:
        return reordered(params, order.key, order.node)
    return ctx.opaque("it takes rows by a permutation of other rows, or elements that are not rows of the batch")


def inverted(ctx: OpContext) -> Fact:
    """InvertPermutation."""
    fact = ctx.facts[0]
    if isinstance(fact, Shuffled):
        return Shuffled(fact.within, ctx.named(), ctx.node.name)
    return ctx.opaque("it inverts an unknown permutation")


RULES: dict[str, Rule] = {**dict.fromkeys(having(Trait.SHUFFLES), shuffle), "InvertPermutation": inverted}
