"""Rules for loops with one iteration per example of the batch, such as those of `tf.map_fn`."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.names import data_inputs
from autodist.graph.ops import Trait, having
from autodist.layout.factors import power
from autodist.layout.facts import REPLICATED, Dims, Fact, Form, ListOf, LoopValue, Role, Sharded, UnknownFact, form_of
from autodist.layout.lengths import is_length_of, length
from autodist.layout.op_context import OpContext

_MAX_ITERATIONS = 4
_DEPENDS_ON_OTHERS = "each iteration processes one example of the shard and goes on from what another example has left"


def map_over_examples(ctx: OpContext) -> list[Fact] | None:
    """Returns the results of a While that processes each example independently; None for any other loop."""
    bounds = [bound for index in range(len(ctx.facts)) if (bound := _bound(ctx, index)) is not None]
    if not bounds:
        return None
    within = bounds[0]
    state = [_initial(ctx, index, within) for index in range(len(ctx.facts))]
    [goes_on] = ctx.scope.call(ctx, ctx.node.attr["cond"].func.name, state, ctx.inputs)
    if goes_on != LoopValue(Role.CONDITION, within):
        return None
    for _ in range(_MAX_ITERATIONS):
        after = ctx.scope.call(ctx, ctx.node.attr["body"].func.name, state, ctx.inputs)
        carried = [_carried(ctx, old, new) for old, new in zip(state, after, strict=True)]
        if carried == state:
            return [_after_loop(ctx, index, fact) for index, fact in enumerate(state)]
        state = carried
    return [ctx.unknown(_DEPENDS_ON_OTHERS)] * len(state)


def _bound(ctx: OpContext, index: int) -> Sharded | None:
    """Returns the rows counted by an input; None if it is not such a count."""
    fact = ctx.facts[index]
    if not isinstance(fact, Dims) or not fact.is_scalar or fact.forms[0].is_replicated:
        return None
    bound = length(ctx, index)
    return bound if isinstance(bound, Sharded) and bound.per is not None else None


def _initial(ctx: OpContext, index: int, within: Sharded) -> Fact:
    """Returns a loop variable's layout in the first iteration; iteration counters start from zero."""
    fact = ctx.facts[index]
    if _bound(ctx, index) == within:
        return LoopValue(Role.COUNT, within)
    is_integer = tf.as_dtype(ctx.node.attr["T"].list.type[index]).is_integer
    if fact == REPLICATED and is_integer and ctx.rank(index) == 0 and ctx.is_zero(index):
        return LoopValue(Role.INDEX, within)
    if isinstance(fact, ListOf) and fact.element is None and not _has_place_for_each(ctx, index, within):
        return ctx.unknown("it fills a list that is not known to have one place per example")
    return fact


def _has_place_for_each(ctx: OpContext, index: int, within: Sharded) -> bool:
    """Returns True if an empty list has a place for each example, or grows."""
    node = ctx.scope.producer(ctx.inputs[index])
    if node is None or node.op == "EmptyTensorList":
        return node is not None
    inputs = data_inputs(node)
    return node.op == "TensorListReserve" and is_length_of(OpContext(node, inputs, [], ctx.scope), 1, within)


def _carried(ctx: OpContext, old: Fact, new: Fact) -> Fact:
    if isinstance(old, LoopValue) and old.role is Role.INDEX:
        if new == LoopValue(Role.NEXT_INDEX, old.within):
            return old
        return REPLICATED if new in (REPLICATED, old) else ctx.unknown(_DEPENDS_ON_OTHERS)
    if isinstance(old, ListOf) and isinstance(new, ListOf) and (old.element is None or old == new):
        return new
    return old if old == new or isinstance(old, UnknownFact) else ctx.unknown(_DEPENDS_ON_OTHERS)


def _after_loop(ctx: OpContext, index: int, fact: Fact) -> Fact:
    node = ctx.scope.producer(ctx.inputs[index])
    if isinstance(fact, ListOf) and fact.element is not None and node is not None and node.op == "EmptyTensorList":
        return ctx.unknown("it is not known how many elements an iteration adds to a list")
    if isinstance(fact, LoopValue):
        return Dims((Form(factors=power(fact.within.count, 1)),), (None,), True)
    return fact


def loop_value(ctx: OpContext, is_stateless: bool) -> Fact | None:
    """Returns the layout of an op on the iteration number or the iteration's example; None if it takes neither.

    The result of a stateless op that draws no numbers belongs to the same example as its input.
    """
    loop_values = [fact for fact in ctx.facts if isinstance(fact, LoopValue)]
    lists = [fact for fact in ctx.facts if isinstance(fact, ListOf)]
    if not loop_values or (lists and ctx.node.op in having(Trait.LIST)):
        return None
    if ctx.node.op in having(Trait.IDENTITY):
        return ctx.facts[0]
    within, roles = loop_values[0].within, {fact.role for fact in loop_values}
    if any(fact.within != within for fact in loop_values) or lists:
        return ctx.unknown("it combines examples of two batches, or an example and a list")
    if _selects_example(ctx, within):
        return LoopValue(Role.EXAMPLE, within, ctx.facts[0].mixed_at if isinstance(ctx.facts[0], Form) else None)
    others = [form_of(fact) for fact in ctx.facts if not isinstance(fact, LoopValue)]
    unknown = next((form for form in others if isinstance(form, UnknownFact)), None)
    if unknown is not None:
        return UnknownFact(unknown.reason)
    if roles == {Role.EXAMPLE} and all(form == REPLICATED for form in others):
        if is_stateless or ctx.node.op in having(Trait.READ):
            return LoopValue(Role.EXAMPLE, within, next((f.mixed_at for f in loop_values if f.mixed_at), None))
        return ctx.unknown("it draws random numbers or keeps a state while it iterates over the examples")
    return _from_counter(ctx, within, [fact.role if isinstance(fact, LoopValue) else None for fact in ctx.facts])


def _selects_example(ctx: OpContext, within: Sharded) -> bool:
    """Returns True if an op selects the iteration's example of a batch: x[i], x[i:i + 1], tf.gather(x, i)."""
    batch, places = ctx.facts[0], [fact.role if isinstance(fact, LoopValue) else None for fact in ctx.facts]
    if not isinstance(batch, Form) or batch.base != within or batch.factors:
        return False
    if ctx.node.op == "GatherV2":
        return places == [None, Role.INDEX, None] and ctx.scalar(2) == 0 and not ctx.number("batch_dims")
    masks = [ctx.number(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis", "new_axis")]
    first_stride = ctx.constant(3) if ctx.node.op == "StridedSlice" and places[1] is Role.INDEX else None
    ends = bool(ctx.number("shrink_axis_mask") & 1) or places[2] is Role.NEXT_INDEX
    return first_stride is not None and int(first_stride.reshape(-1)[0]) == 1 and ends and not any(masks)


def _from_counter(ctx: OpContext, within: Sharded, roles: list[Role | None]) -> Fact:
    op = ctx.node.op
    are_same = all(form_of(fact) == REPLICATED for fact in ctx.facts[1:])
    if op == "Pack" and are_same and roles[0] in (Role.INDEX, Role.NEXT_INDEX):
        return LoopValue(roles[0], within)  # begin or end of a slice
    if op in having(Trait.ADDITION) and roles in ([Role.INDEX, None], [None, Role.INDEX]):
        if ctx.scalar(roles.index(None)) == 1:
            return LoopValue(Role.NEXT_INDEX, within)
    if op == "Less" and roles == [Role.INDEX, Role.COUNT]:
        return LoopValue(Role.CONDITION, within)
    if op == "LogicalAnd" and roles == [Role.CONDITION] * 2:
        return LoopValue(Role.CONDITION, within)
    return ctx.unknown("it depends on the example's number within the replica's shard of the batch")
