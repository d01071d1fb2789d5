"""Ops that call functions: calls, branches and loops."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.arithmetic import add_forms
from autodist.graph.propagation.by_example import map_over_examples
from autodist.graph.propagation.factors import PartialSum
from autodist.graph.propagation.facts import (
    SAME,
    Base,
    Dims,
    Fact,
    Form,
    ListOf,
    Nothing,
    Recovery,
    Statistic,
    UnknownFact,
    form_of,
    made_of_state,
)
from autodist.graph.propagation.op_context import OpContext, Rule, tensor_name

_MOST_TURNS = 12


def call(site: OpContext) -> list[Fact]:
    """PartitionedCall and its stateful twin: what the body gives."""
    return site.scope.call(site, site.node.attr["f"].func.name, site.facts, site.inputs)


def if_(site: OpContext) -> list[Fact]:
    """If: both branches, joined, where the condition is the same on all replicas."""
    branches = [site.node.attr[name].func.name for name in ("then_branch", "else_branch")]
    return _branches(site, branches)


def case(site: OpContext) -> list[Fact]:
    """Case: as If, with many branches."""
    return _branches(site, [branch.name for branch in site.node.attr["branches"].list.func])


def _branches(site: OpContext, names: list[str]) -> list[Fact]:
    results = [site.scope.call(site, name, site.facts[1:], site.inputs[1:]) for name in names]
    joined = [_joined(site, list(facts), output) for output, facts in enumerate(zip(*results, strict=True))]
    return joined if form_of(site.facts[0]) == SAME else [_chosen_by_part(site, fact) for fact in joined]


def _chosen_by_part(site: OpContext, fact: Fact) -> Fact:
    """Branches of which each replica takes its own, as its examples ask: rows stay rows, but see one another."""
    if isinstance(fact, Form) and fact.rows is not None and not fact.factors:
        return replace(fact, mixed_at=fact.mixed_at or site.node.name)
    if isinstance(fact, UnknownFact):
        return UnknownFact(fact.reason)
    return site.opaque("which branch is taken depends on the replica's part of the batch")


def _joined(site: OpContext, facts: list[Fact], output: int) -> Fact:
    """What is known of an output whichever branch is taken: as of a sum of them, for sums and means of one weight."""
    total = facts[0]
    for fact in facts[1:]:
        total = join(site, total, fact)
    forms = [form_of(fact) for fact in facts]
    if isinstance(total, UnknownFact) and not any(isinstance(form, Form) and form.rows for form in forms):
        added = add_forms(site, forms, output)
        return added if isinstance(added, Form) else total
    return total


def join(site: OpContext, left: Fact, right: Fact) -> Fact:
    """What is known of a value that may be either."""
    if left == right:
        return left
    if isinstance(left, Nothing) or isinstance(right, Nothing):
        return left if isinstance(right, Nothing) else right
    for fact in (left, right):
        if isinstance(fact, UnknownFact):
            return fact
    if isinstance(left, ListOf) and isinstance(right, ListOf):
        if left.element is None or right.element is None:
            return left if right.element is None else right
        return ListOf(join(site, left.element, right.element))
    if isinstance(left, Dims) and isinstance(right, Dims) and left.forms == right.forms:
        pairs = zip(left.values, right.values, strict=True)
        return replace(left, values=tuple(a if a == b else None for a, b in pairs))
    if (state := made_of_state([left, right])) is not None:
        return state
    forms = form_of(left), form_of(right)
    if forms[0] == forms[1]:
        return forms[0]
    if SAME in forms:  # batch normalisation's moments in training, the averages of earlier batches else
        other = forms[1] if forms[0] == SAME else forms[0]
        if isinstance(other, Statistic) or _is_mean(other):
            return other
    if all(isinstance(form, Form) and form.rows for form in forms) and _differ_in_per_alone(forms[0], forms[1]):
        return forms[0]
    return site.opaque("its branches or turns give values that join in different ways")


def _is_mean(fact: Fact) -> bool:
    """Whether it is a sum over the part divided by one other: a mean of what is the same everywhere is the same."""
    exponents = [exponent for _, exponent in fact.factors] if isinstance(fact, Form) else []
    return isinstance(fact, Form) and fact.base is Base.ADDED and exponents == [-1]


def _differ_in_per_alone(left: object, right: object) -> bool:
    assert isinstance(left, Form) and isinstance(right, Form) and left.rows and right.rows
    return replace(left.rows, per=None) == replace(right.rows, per=None) and left.factors == right.factors


def while_(site: OpContext) -> list[Fact]:
    """While: what stays true from turn to turn, where the number of turns is the same on all replicas."""
    body, condition = site.node.attr["body"].func.name, site.node.attr["cond"].func.name
    state = list(site.facts)
    for _ in range(_MOST_TURNS):
        after = site.scope.call(site, body, state, site.inputs)
        joined = [_carried(site, old, new, index) for index, (old, new) in enumerate(zip(state, after, strict=True))]
        if joined == state:
            break
        state = joined
    else:
        return [site.opaque("what its turns give does not settle", Recovery.BATCH_SHAPED)] * len(state)
    [again] = site.scope.call(site, condition, state, site.inputs)
    if form_of(again) == SAME:
        return [_after_loop(site, fact, index) for index, fact in enumerate(state)]
    by_example = map_over_examples(site)
    if by_example is not None:
        return by_example
    without_rows = [SAME if _is_rows(fact) else fact for fact in state]
    [bound] = site.scope.call(site, condition, without_rows, site.inputs)
    if form_of(bound) == SAME:
        return [_ran_as_rows_ask(site)] * len(state)
    return [_after_own_turns(site, fact, index) for index, fact in enumerate(state)]


def _is_rows(fact: Fact) -> bool:
    return isinstance(fact, Form) and fact.rows is not None


def _ran_as_rows_ask(site: OpContext) -> UnknownFact:
    return site.opaque("how often it runs depends on the replica's part of the batch")


def _after_own_turns(site: OpContext, fact: Fact, index: int) -> Fact:
    """A loop variable's last value where a bound was made of the part before the loop: the longest of its sequences.

    Each replica makes its own number of turns, and its examples see one another thereby; lists may differ in length,
    unless they were made with all their elements.
    """
    if isinstance(fact, ListOf) and fact.element is not None and _has_its_length(site, index):
        return ListOf(_after_own_turns(site, fact.element, index))
    if isinstance(fact, Form) and fact.rows is not None and not fact.factors:
        return replace(fact, mixed_at=fact.mixed_at or site.node.name)
    return _ran_as_rows_ask(site)


def _has_its_length(site: OpContext, index: int) -> bool:
    """Whether a list was made with a number of elements that is the same on all replicas."""
    made = site.scope.producer(site.inputs[index])
    return (
        made is not None
        and made.op == "TensorListReserve"
        and form_of(site.scope.fact(tensor_name(made.input[1]))) == SAME
    )


def _after_loop(site: OpContext, fact: Fact, index: int) -> Fact:
    """A loop variable's last value, which may not depend on what another one was before the last turn."""
    if isinstance(fact, Form):
        others = {site.named(other) for other in range(len(site.facts)) if other != index}
        if others & {factor.tensor for factor, _ in fact.factors if isinstance(factor, PartialSum)}:
            return site.opaque("it divides by a sum over the batch that changes from turn to turn")
    return fact


def _carried(site: OpContext, old: Fact, new: Fact, index: int) -> Fact:
    """The join of a loop variable before and after a turn; a uniform start fits rows (a state of zeros)."""
    if isinstance(old, Dims) and isinstance(new, (Dims, Form)):
        old, new = form_of(old), form_of(new)
    if old == SAME and isinstance(new, Form) and new.rows is None and site.is_zero(index):
        return new
    if old == SAME and isinstance(new, Form) and new.rows is not None and site.is_uniform(index):
        length = site.shape(index)[new.rows.axis] if site.shape(index).rank is not None else 1
        return new if length != 1 else join(site, old, new)
    return join(site, old, new)


RULES: dict[str, Rule] = {
    **dict.fromkeys(having(Trait.CALL), call),
    **dict.fromkeys(["If", "StatelessIf"], if_),
    **dict.fromkeys(["Case", "StatelessCase"], case),
    **dict.fromkeys(having(Trait.LOOP), while_),
}
