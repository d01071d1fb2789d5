"""Loops of which each turn is for one example of the batch, as `tf.map_fn` makes them."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.factors import power
from autodist.graph.propagation.facts import SAME, Dims, Fact, Form, InTurn, ListOf, Role, Rows, UnknownFact, form_of
from autodist.graph.propagation.lengths import is_length_of, length
from autodist.graph.propagation.op_context import OpContext, tensor_name

_MOST_TURNS = 4
_GOES_ON = "each of its turns is for one example of the part, and goes on from what another example has left"


def map_over_examples(site: OpContext) -> list[Fact] | None:
    """What a While leaves whose turns are the examples, each by itself; None where its turns are counted otherwise."""
    bounds = [bound for index in range(len(site.facts)) if (bound := _bound(site, index)) is not None]
    if not bounds:
        return None
    within = bounds[0]
    state = [_at_start(site, index, within) for index in range(len(site.facts))]
    [goes_on] = site.scope.call(site, site.node.attr["cond"].func.name, state, site.inputs)
    if goes_on != InTurn(Role.GOES_ON, within):
        return None
    for _ in range(_MOST_TURNS):
        after = site.scope.call(site, site.node.attr["body"].func.name, state, site.inputs)
        carried = [_carried(site, old, new) for old, new in zip(state, after, strict=True)]
        if carried == state:
            return [_left(site, index, fact) for index, fact in enumerate(state)]
        state = carried
    return [site.opaque(_GOES_ON)] * len(state)


def _bound(site: OpContext, index: int) -> Rows | None:
    """The rows of which an input is the number, as far as it is one."""
    fact = site.facts[index]
    if not isinstance(fact, Dims) or not fact.is_scalar or fact.forms[0].is_same:
        return None
    found = length(site, index)
    return found if isinstance(found, Rows) and found.per is not None else None


def _at_start(site: OpContext, index: int, within: Rows) -> Fact:
    """A loop variable as the first turn finds it: what counts turns begins with zero."""
    fact = site.facts[index]
    if _bound(site, index) == within:
        return InTurn(Role.BOUND, within)
    is_integer = tf.as_dtype(site.node.attr["T"].list.type[index]).is_integer
    if fact == SAME and is_integer and site.rank(index) == 0 and site.is_zero(index):
        return InTurn(Role.TURN, within)
    if isinstance(fact, ListOf) and fact.element is None and not _is_as_long(site, index, within):
        return site.opaque("it fills a list that is not known to have a place for each example")
    return fact


def _is_as_long(site: OpContext, index: int, within: Rows) -> bool:
    """Whether an empty list has a place for each example, or grows."""
    node = site.scope.producer(site.inputs[index])
    if node is None or node.op == "EmptyTensorList":
        return node is not None
    inputs = [tensor_name(name) for name in node.input if not name.startswith("^")]
    return node.op == "TensorListReserve" and is_length_of(OpContext(node, inputs, [], site.scope), 1, within)


def _carried(site: OpContext, old: Fact, new: Fact) -> Fact:
    if isinstance(old, InTurn) and old.role is Role.TURN:
        if new == InTurn(Role.NEXT, old.within):
            return old
        return SAME if new in (SAME, old) else site.opaque(_GOES_ON)
    if isinstance(old, ListOf) and isinstance(new, ListOf) and (old.element is None or old == new):
        return new
    return old if old == new or isinstance(old, UnknownFact) else site.opaque(_GOES_ON)


def _left(site: OpContext, index: int, fact: Fact) -> Fact:
    node = site.scope.producer(site.inputs[index])
    if isinstance(fact, ListOf) and fact.element is not None and node is not None and node.op == "EmptyTensorList":
        return site.opaque("how often a turn adds to a list is not followed")
    if isinstance(fact, InTurn):
        return Dims((Form(factors=power(fact.within.count, 1)),), (None,), True)
    return fact


def in_turn(site: OpContext, is_stateless: bool) -> Fact | None:
    """What an op in such a loop makes of the number of the turn or of the turn's example; None where it takes neither.

    An op that draws no numbers and keeps no state makes of one example what belongs to that example.
    """
    found = [fact for fact in site.facts if isinstance(fact, InTurn)]
    lists = [fact for fact in site.facts if isinstance(fact, ListOf)]
    if not found or (lists and site.node.op in having(Trait.LIST)):
        return None
    if site.node.op in having(Trait.SAME):
        return site.facts[0]
    within, roles = found[0].within, {fact.role for fact in found}
    if any(fact.within != within for fact in found) or lists:
        return site.opaque("it combines examples of two batches, or an example and a list")
    if _takes_own(site, within):
        return InTurn(Role.EXAMPLE, within, site.facts[0].mixed_at if isinstance(site.facts[0], Form) else None)
    others = [form_of(fact) for fact in site.facts if not isinstance(fact, InTurn)]
    opaque = next((form for form in others if isinstance(form, UnknownFact)), None)
    if opaque is not None:
        return UnknownFact(opaque.reason)
    if roles == {Role.EXAMPLE} and all(form == SAME for form in others):
        if is_stateless or site.node.op in having(Trait.READ):
            return InTurn(Role.EXAMPLE, within, next((f.mixed_at for f in found if f.mixed_at), None))
        return site.opaque("it draws numbers, or keeps a state, for one example after the other")
    return _counted(site, within, [fact.role if isinstance(fact, InTurn) else None for fact in site.facts])


def _takes_own(site: OpContext, within: Rows) -> bool:
    """Whether an op takes the turn's example of a batch: x[i], x[i:i + 1], tf.gather(x, i)."""
    batch, places = site.facts[0], [fact.role if isinstance(fact, InTurn) else None for fact in site.facts]
    if not isinstance(batch, Form) or batch.base != within or batch.factors:
        return False
    if site.node.op == "GatherV2":
        return places == [None, Role.TURN, None] and site.scalar(2) == 0 and not site.number("batch_dims")
    masks = [site.number(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis", "new_axis")]
    first_stride = site.constant(3) if site.node.op == "StridedSlice" and places[1] is Role.TURN else None
    ends = bool(site.number("shrink_axis_mask") & 1) or places[2] is Role.NEXT
    return first_stride is not None and int(first_stride.reshape(-1)[0]) == 1 and ends and not any(masks)


def _counted(site: OpContext, within: Rows, roles: list[Role | None]) -> Fact:
    op = site.node.op
    are_same = all(form_of(fact) == SAME for fact in site.facts[1:])
    if op == "Pack" and are_same and roles[0] in (Role.TURN, Role.NEXT):
        return InTurn(roles[0], within)  # where a slice begins or ends
    if op in having(Trait.ADDITION) and roles in ([Role.TURN, None], [None, Role.TURN]):
        if site.scalar(roles.index(None)) == 1:
            return InTurn(Role.NEXT, within)
    if op == "Less" and roles == [Role.TURN, Role.BOUND]:
        return InTurn(Role.GOES_ON, within)
    if op == "LogicalAnd" and roles == [Role.GOES_ON] * 2:
        return InTurn(Role.GOES_ON, within)
    return site.opaque("it depends on the number that an example has in the replica's part of the batch")
