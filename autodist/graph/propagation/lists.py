"""TensorLists, with which loops keep what each turn gives: all elements alike."""

from __future__ import annotations

from autodist.graph.propagation.factors import power
from autodist.graph.propagation.facts import (
    SAME,
    Dims,
    Fact,
    Form,
    InTurn,
    ListOf,
    Role,
    Rows,
    Statistic,
    UnknownFact,
    form_of,
    with_axis,
)
from autodist.graph.propagation.functions import join
from autodist.graph.propagation.op_context import OpContext, Rule

_BY_POSITION = "it takes an example by its number in the replica's part of the batch"


def empty(ctx: OpContext) -> Fact:
    return ListOf(None)


def from_tensor(ctx: OpContext) -> Fact:
    """TensorListFromTensor: the first axis becomes the list."""
    form = form_of(ctx.facts[0])
    if not isinstance(form, Form) or form.rows is None:
        return ListOf(form)
    if form.rows.axis == 0:
        if form.factors:
            return ctx.opaque("it makes a list of a batch that is scaled by sums over it")
        return ListOf(InTurn(Role.EXAMPLE, form.rows, form.mixed_at))
    return ListOf(with_axis(form, form.rows.axis - 1))


def get_item(ctx: OpContext) -> Fact:
    found = ctx.facts[0]
    if not isinstance(found, ListOf):
        return found if isinstance(found, UnknownFact) else ctx.opaque("it reads from what is no list")
    if isinstance(found.element, InTurn):
        return found.element if ctx.facts[1] == InTurn(Role.TURN, found.element.within) else ctx.opaque(_BY_POSITION)
    if form_of(ctx.facts[1]) != SAME:
        return ctx.opaque("which element it takes depends on the batch")
    return SAME if found.element is None else found.element


def set_item(ctx: OpContext) -> Fact:
    """TensorListSetItem: list, index, item."""
    place, item = ctx.facts[1], ctx.facts[2]
    if isinstance(place, InTurn) and place.role is Role.TURN:
        return _with_item(ctx, _of_turn(item, place.within), True)
    return _with_item(ctx, item, form_of(place) == SAME)


def _of_turn(item: Fact, within: Rows) -> Fact:
    """What a turn gives its example: what it made of that, or what is the same for all."""
    if isinstance(item, InTurn) or item == SAME:
        return InTurn(Role.EXAMPLE, within) if item == SAME else item
    return UnknownFact("each turn of a loop over the examples puts what belongs to all of them into a list")


def push_back(ctx: OpContext) -> Fact:
    return _with_item(ctx, ctx.facts[1], True)


def _with_item(ctx: OpContext, item: Fact, at_same_place: bool) -> Fact:
    found = ctx.facts[0]
    if not isinstance(found, ListOf):
        return found if isinstance(found, UnknownFact) else ctx.opaque("it writes to what is no list")
    if not at_same_place:
        return ctx.opaque("where it writes depends on the batch")
    return join(ctx, found, ListOf(item if isinstance(item, ListOf | InTurn) else form_of(item)))


def stack(ctx: OpContext) -> Fact:
    """TensorListStack: the list becomes the first axis."""
    found = ctx.facts[0]
    if not isinstance(found, ListOf):
        return found if isinstance(found, UnknownFact) else ctx.opaque("it stacks what is no list")
    if isinstance(found.element, InTurn):
        is_example = found.element.role is Role.EXAMPLE
        return Form(found.element.within, mixed_at=found.element.mixed_at) if is_example else ctx.opaque(_BY_POSITION)
    element = SAME if found.element is None else form_of(found.element)
    if isinstance(element, (UnknownFact, Statistic)) or not isinstance(element.base, Rows):
        return element
    return with_axis(element, element.base.axis + 1)


def length(ctx: OpContext) -> Fact:
    found = ctx.facts[0]
    if isinstance(found, ListOf) and isinstance(found.element, InTurn):
        return Dims((Form(factors=power(found.element.within.count, 1)),), (None,), True)
    if isinstance(found, ListOf) and found.element is not None:
        return SAME
    return ctx.opaque("it counts the elements of what is not known")


def array(ctx: OpContext) -> list[Fact]:
    """TensorArrayV3: its handle, and its flow, which stands for what is in it."""
    return [SAME, ListOf(None)]


def _as_list(rule: Rule, *order: int) -> Rule:
    """A rule for the list that a tensor array's flow stands for; `order` says where its arguments are."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        inputs, facts = [ctx.inputs[index] for index in order], [ctx.facts[index] for index in order]
        return rule(OpContext(ctx.node, inputs, facts, ctx.scope))

    return apply


def scatter(ctx: OpContext) -> Fact:
    """TensorArrayScatterV3 as list, value: the first axis becomes the list."""
    items = from_tensor(OpContext(ctx.node, ctx.inputs[1:], ctx.facts[1:], ctx.scope))
    if isinstance(items, ListOf) and isinstance(items.element, InTurn):
        return ctx.opaque("it makes a list of the batch")
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
