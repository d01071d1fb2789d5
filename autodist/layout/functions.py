"""Rules for ops that call functions: calls, conditionals and loops."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.functions import branches_of
from autodist.graph.ops import Trait, having
from autodist.layout.degree import add_forms
from autodist.layout.example_loops import map_over_examples
from autodist.layout.factors import PartialSum
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Dims,
    Fact,
    Form,
    ListOf,
    Recovery,
    Statistic,
    UnknownFact,
    Unvisited,
    common_generator_state,
    form_of,
    mixed_within,
)
from autodist.layout.op_context import OpContext, Rule, tensor_name

_MAX_ITERATIONS = 12


def call(ctx: OpContext) -> list[Fact]:
    """PartitionedCall and StatefulPartitionedCall: the facts of the body's results."""
    return ctx.scope.call(ctx, ctx.node.attr["f"].func.name, ctx.facts, ctx.inputs)


def branch(ctx: OpContext) -> list[Fact]:
    """If and Case: the common layout of all branches; the condition must be replicated for an exact result."""
    results = [ctx.scope.call(ctx, name, ctx.facts[1:], ctx.inputs[1:]) for name in branches_of(ctx.node)]
    joined = [_merge_branches(ctx, list(facts), output) for output, facts in enumerate(zip(*results, strict=True))]
    return joined if form_of(ctx.facts[0]) == REPLICATED else [_branch_per_shard(ctx, fact) for fact in joined]


def _branch_per_shard(ctx: OpContext, fact: Fact) -> Fact:
    """Returns the layout if each replica's shard selects its branch: rows remain, but examples interact."""
    if isinstance(fact, Form) and fact.rows is not None and not fact.factors:
        return replace(fact, mixed_at=fact.mixed_at or ctx.node.name)
    if isinstance(fact, UnknownFact):
        return UnknownFact(fact.reason)
    return ctx.unknown("the branch that it takes depends on the replica's shard of the batch")


def _merge_branches(ctx: OpContext, facts: list[Fact], output: int) -> Fact:
    """Returns the layout of an output that holds for every branch; sums and means of one weight add up."""
    total = facts[0]
    for fact in facts[1:]:
        total = join(ctx, total, fact)
    forms = [form_of(fact) for fact in facts]
    if isinstance(total, UnknownFact) and not any(isinstance(form, Form) and form.rows for form in forms):
        added = add_forms(ctx, forms, output)
        return added if isinstance(added, Form) else total
    return total


def join(ctx: OpContext, left: Fact, right: Fact) -> Fact:
    """Returns the layout of a value that is either of two; examples interact in it if they do in one of them."""
    if left == right:
        return left if mixed_within(left) else right
    if isinstance(left, Unvisited) or isinstance(right, Unvisited):
        return left if isinstance(right, Unvisited) else right
    for fact in (left, right):
        if isinstance(fact, UnknownFact):
            return fact
    if isinstance(left, ListOf) and isinstance(right, ListOf):
        if left.element is None or right.element is None:
            return left if right.element is None else right
        return ListOf(join(ctx, left.element, right.element))
    if isinstance(left, Dims) and isinstance(right, Dims) and left.forms == right.forms:
        pairs = zip(left.values, right.values, strict=True)
        return replace(left, values=tuple(a if a == b else None for a, b in pairs))
    if (state := common_generator_state([left, right])) is not None:
        return state
    forms = form_of(left), form_of(right)
    if forms[0] == forms[1]:
        return forms[0] if mixed_within(forms[0]) else forms[1]
    if REPLICATED in forms:  # batch normalisation: moments of the batch in training, moving averages otherwise
        other = forms[1] if forms[0] == REPLICATED else forms[0]
        if isinstance(other, Statistic) or _is_mean(other):
            return other
    if all(isinstance(form, Form) and form.rows for form in forms) and _differ_in_per_alone(forms[0], forms[1]):
        return forms[0]
    return ctx.unknown("its branches or iterations return values with different layouts")


def _is_mean(fact: Fact) -> bool:
    """Returns True for a sum over the shard divided by one factor; a replicated value is such a mean, too."""
    exponents = [exponent for _, exponent in fact.factors] if isinstance(fact, Form) else []
    return isinstance(fact, Form) and fact.base is Base.PARTIAL_SUM and exponents == [-1]


def _differ_in_per_alone(left: object, right: object) -> bool:
    assert isinstance(left, Form) and isinstance(right, Form) and left.rows and right.rows
    return replace(left.rows, per=None) == replace(right.rows, per=None) and left.factors == right.factors


def while_(ctx: OpContext) -> list[Fact]:
    """While: the layouts that hold in every iteration, if the number of iterations is replicated."""
    body, condition = ctx.node.attr["body"].func.name, ctx.node.attr["cond"].func.name
    state = list(ctx.facts)
    for _ in range(_MAX_ITERATIONS):
        after = ctx.scope.call(ctx, body, state, ctx.inputs)
        joined = [_carried(ctx, old, new, index) for index, (old, new) in enumerate(zip(state, after, strict=True))]
        is_stable = joined == state and [*map(mixed_within, joined)] == [*map(mixed_within, state)]
        state = joined
        if is_stable:
            break
    else:
        return [ctx.unknown("the layouts of its loop variables do not converge", Recovery.BATCH_SHAPED)] * len(state)
    [again] = ctx.scope.call(ctx, condition, state, ctx.inputs)
    if form_of(again) == REPLICATED:
        return [_after_loop(ctx, fact, index) for index, fact in enumerate(state)]
    by_example = map_over_examples(ctx)
    if by_example is not None:
        return by_example
    without_rows = [REPLICATED if _is_rows(fact) else fact for fact in state]
    [bound] = ctx.scope.call(ctx, condition, without_rows, ctx.inputs)
    if form_of(bound) == REPLICATED:
        return [_shard_dependent_loop(ctx)] * len(state)
    return [_after_shard_dependent_loop(ctx, fact, index) for index, fact in enumerate(state)]


def _is_rows(fact: Fact) -> bool:
    return isinstance(fact, Form) and fact.rows is not None


def _shard_dependent_loop(ctx: OpContext) -> UnknownFact:
    return ctx.unknown("how often it runs depends on the replica's shard of the batch")


def _after_shard_dependent_loop(ctx: OpContext, fact: Fact, index: int) -> Fact:
    """Returns a loop variable's final layout if the trip count comes from the shard, such as its longest sequence.

    Replicas run different numbers of iterations, so that examples of a shard interact. Lists may differ in length
    unless they were reserved with all their elements.
    """
    if isinstance(fact, ListOf) and fact.element is not None and _has_replicated_length(ctx, index):
        return ListOf(_after_shard_dependent_loop(ctx, fact.element, index))
    if isinstance(fact, Form) and fact.rows is not None and not fact.factors:
        return replace(fact, mixed_at=fact.mixed_at or ctx.node.name)
    return _shard_dependent_loop(ctx)


def _has_replicated_length(ctx: OpContext, index: int) -> bool:
    """Returns True if a list was reserved with a number of elements that is replicated."""
    made = ctx.scope.producer(ctx.inputs[index])
    return (
        made is not None
        and made.op == "TensorListReserve"
        and form_of(ctx.scope.fact(tensor_name(made.input[1]))) == REPLICATED
    )


def _after_loop(ctx: OpContext, fact: Fact, index: int) -> Fact:
    """Returns a loop variable's final layout, which must not depend on another's value before the last iteration."""
    if isinstance(fact, Form):
        others = {ctx.named(other) for other in range(len(ctx.facts)) if other != index}
        if others & {factor.tensor for factor, _ in fact.factors if isinstance(factor, PartialSum)}:
            return ctx.unknown("it divides by a sum over the batch that changes between iterations")
    return fact


def _carried(ctx: OpContext, old: Fact, new: Fact, index: int) -> Fact:
    """Merges a loop variable's layouts before and after an iteration; a uniform start, such as zeros, fits rows."""
    if isinstance(old, Dims) and isinstance(new, (Dims, Form)):
        old, new = form_of(old), form_of(new)
    if old == REPLICATED and isinstance(new, Form) and new.rows is None and ctx.is_zero(index):
        return new
    if old == REPLICATED and isinstance(new, Form) and new.rows is not None and ctx.is_uniform(index):
        length = ctx.shape(index)[new.rows.axis] if ctx.shape(index).rank is not None else 1
        return new if length != 1 else join(ctx, old, new)
    return join(ctx, old, new)


RULES: dict[str, Rule] = {
    **dict.fromkeys(having(Trait.CALL), call),
    **dict.fromkeys(["If", "StatelessIf", "Case", "StatelessCase"], branch),
    **dict.fromkeys(having(Trait.LOOP), while_),
}
