"""Rules for TensorLists and TensorArrays, which collect a loop's results; all elements share one layout."""

from __future__ import annotations

from autodist.layout.factors import power
from autodist.layout.facts import (
    REPLICATED,
    Dims,
    Fact,
    Form,
    ListOf,
    LoopValue,
    Role,
    Sharded,
    Statistic,
    UnknownFact,
    form_of,
    with_axis,
)
from autodist.layout.functions import join
from autodist.layout.op_context import OpContext, Rule

_BY_POSITION = "it selects an example by its number within the replica's shard of the batch"


def empty(ctx: OpContext) -> Fact:
    return ListOf(None)


def from_tensor(ctx: OpContext) -> Fact:
    """TensorListFromTensor: the first axis becomes the list."""
    form = form_of(ctx.facts[0])
    if not isinstance(form, Form) or form.rows is None:
        return ListOf(form)
    if form.rows.axis == 0:
        if form.factors:
            return ctx.unknown("it converts a batch that is scaled by sums over the batch to a list")
        return ListOf(LoopValue(Role.EXAMPLE, form.rows, form.mixed_at))
    return ListOf(with_axis(form, form.rows.axis - 1))


def get_item(ctx: OpContext) -> Fact:
    items = ctx.facts[0]
    if not isinstance(items, ListOf):
        return items if isinstance(items, UnknownFact) else ctx.unknown("it reads from a tensor that is not a list")
    if isinstance(items.element, LoopValue):
        return (
            items.element if ctx.facts[1] == LoopValue(Role.INDEX, items.element.within) else ctx.unknown(_BY_POSITION)
        )
    if form_of(ctx.facts[1]) != REPLICATED:
        return ctx.unknown("the index that it reads depends on the batch")
    return REPLICATED if items.element is None else items.element


def set_item(ctx: OpContext) -> Fact:
    """TensorListSetItem (list, index, item)."""
    place, item = ctx.facts[1], ctx.facts[2]
    if isinstance(place, LoopValue) and place.role is Role.INDEX:
        return _with_item(ctx, _item_of_example(item, place.within), True)
    return _with_item(ctx, item, form_of(place) == REPLICATED)


def _item_of_example(item: Fact, within: Sharded) -> Fact:
    """Returns the layout of an iteration's item for its example: derived from the example, or replicated."""
    if isinstance(item, LoopValue) or item == REPLICATED:
        return LoopValue(Role.EXAMPLE, within) if item == REPLICATED else item
    return UnknownFact("each iteration of a loop over the examples appends a value of all examples to a list")


def push_back(ctx: OpContext) -> Fact:
    return _with_item(ctx, ctx.facts[1], True)


def _with_item(ctx: OpContext, item: Fact, at_same_place: bool) -> Fact:
    items = ctx.facts[0]
    if not isinstance(items, ListOf):
        return items if isinstance(items, UnknownFact) else ctx.unknown("it writes to a tensor that is not a list")
    if not at_same_place:
        return ctx.unknown("the index that it writes depends on the batch")
    return join(ctx, items, ListOf(item if isinstance(item, ListOf | LoopValue) else form_of(item)))


def stack(ctx: OpContext) -> Fact:
    """TensorListStack: the list becomes the first axis."""
    items = ctx.facts[0]
    if not isinstance(items, ListOf):
        return items if isinstance(items, UnknownFact) else ctx.unknown("it stacks a tensor that is not a list")
    if isinstance(items.element, LoopValue):
        is_example = items.element.role is Role.EXAMPLE
        return Form(items.element.within, mixed_at=items.element.mixed_at) if is_example else ctx.unknown(_BY_POSITION)
    element = REPLICATED if items.element is None else form_of(items.element)
    if isinstance(element, (UnknownFact, Statistic)) or not isinstance(element.base, Sharded):
        return element
    return with_axis(element, element.base.axis + 1)


def length(ctx: OpContext) -> Fact:
    items = ctx.facts[0]
    if isinstance(items, ListOf) and isinstance(items.element, LoopValue):
        return Dims((Form(factors=power(items.element.within.count, 1)),), (None,), True)
    if isinstance(items, ListOf) and items.element is not None:
        return REPLICATED
    return ctx.unknown("it returns the length of an unknown list")


def array(ctx: OpContext) -> list[Fact]:
    """TensorArrayV3: its handle, and its flow, which represents the contents."""
    return [REPLICATED, ListOf(None)]


def _as_list(rule: Rule, *order: int) -> Rule:
    """Adapts a list rule to a TensorArray, whose flow is the list; `order` has the inputs in the rule's order."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        inputs, facts = [ctx.inputs[index] for index in order], [ctx.facts[index] for index in order]
        return rule(OpContext(ctx.node, inputs, facts, ctx.scope))

    return apply


def scatter(ctx: OpContext) -> Fact:
    """TensorArrayScatterV3 as (list, value): the first axis becomes the list."""
    items = from_tensor(OpContext(ctx.node, ctx.inputs[1:], ctx.facts[1:], ctx.scope))
    if isinstance(items, ListOf) and isinstance(items.element, LoopValue):
        return ctx.unknown("it splits the batch into a list")
    return join(ctx, ctx.facts[0], items)


RULES: dict[str, Rule] = {
    "TensorArrayV3": array,
    "TensorArrayReadV3": _as_list(get_item, 2, 1),
    "TensorArrayWriteV3": _as_list(set_item, 3, 1, 2),
    "TensorArrayScatterV3": _as_list(scatter, 3, 2),
    "TensorArrayGatherV3": _as_list(stack, 2),
    "TensorArraySizeV3": _as_list(length, 1),
    **dict.fromkeys(["TensorListReserve", "EmptyTensorList"], empty),
    "TensorListFromTensor": from_tensor,
    "TensorListGetItem": get_item,
    "TensorListSetItem": set_item,
    "TensorListPushBack": push_back,
    "TensorListStack": stack,
    "TensorListLength": length,
}
