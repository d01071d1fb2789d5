"""Rules for selections between two values, and for guards against division by zero."""

from __future__ import annotations

from dataclasses import replace

from autodist.layout.arithmetic import add_operands
from autodist.layout.by_factors import nonlinear
from autodist.layout.combine import has_rows, joined_rows, operands_of, same_rows
from autodist.layout.degree import common_scale
from autodist.layout.facts import (
    Base,
    Dims,
    Fact,
    Form,
    ListOf,
    Permutation,
    Positions,
    Recovery,
    Sharded,
    Statistic,
    UnknownFact,
)
from autodist.layout.lengths import is_length_of, length
from autodist.layout.op_context import OpContext, Rule, tensor_name
from autodist.layout.vanishing import guard_of


def select(ctx: OpContext) -> Fact:
    """Select: the condition must be rows or replicated."""
    if isinstance(ctx.facts[1], Positions) and _is_vectorized_map_index(ctx, ctx.facts[1]):
        return ctx.facts[1]
    if isinstance(ctx.facts[2], Positions | Permutation) and _is_negative(ctx, ctx.facts[2]):
        return ctx.facts[2]
    guarded = _guarded_quotient(ctx)
    if guarded is not None:
        return guarded
    if any(isinstance(fact, ListOf) for fact in ctx.facts):
        return ctx.unknown("it selects between lists of tensors")
    if ctx.node.op == "Select" and ctx.rank(0) == 1 and ctx.rank(1) != 1:
        return _select_rows(ctx)
    branches = add_operands(ctx, (1, 2))
    if isinstance(branches, UnknownFact) and not has_rows(operands_of(ctx)):
        return branches
    condition = operands_of(ctx, (0,))[0]
    if isinstance(condition, Form) and condition.is_replicated and isinstance(branches, (Form, Statistic)):
        return _same_condition(ctx, branches)
    if isinstance(condition, Form) and condition.rows is not None and not condition.factors:
        return _rows_condition(ctx)
    if isinstance(condition, UnknownFact):
        can_recover = condition.recovery is not Recovery.NEVER and has_rows(operands_of(ctx, (1, 2)))
        return _rows_condition(ctx) if can_recover else UnknownFact(condition.reason)
    return ctx.unknown("its condition depends on the whole batch")


def _is_vectorized_map_index(ctx: OpContext, positions: Positions) -> bool:
    """Returns True for `where(n > 1, range(n), 0)`, used by `tf.vectorized_map`: for n = 1, `range(n)` is 0, too."""
    condition = ctx.scope.producer(ctx.inputs[0])
    if condition is None or condition.op != "Greater" or not ctx.is_zero(2) or ctx.rank(2) != 0:
        return False
    comparison = OpContext(condition, [tensor_name(name) for name in condition.input[:2]], [], ctx.scope)
    bound = comparison.constant(1)
    all_of_them = positions.entries == positions.within and is_length_of(comparison, 0, positions.within)
    return all_of_them and bound is not None and bound.ndim == 0 and int(bound) == 1


def _is_negative(ctx: OpContext, numbers: Positions | Permutation) -> bool:
    """Returns True if the condition is `indices < 0` for row indices, which is always false."""
    condition = ctx.scope.producer(ctx.inputs[0])
    if condition is None or condition.op != "Less":
        return False
    comparison = OpContext(condition, [tensor_name(name) for name in condition.input[:2]], [], ctx.scope)
    return comparison.is_zero(1) and ctx.scope.fact(comparison.inputs[0]) == numbers


def _same_condition(ctx: OpContext, branches: Form | Statistic) -> Fact:
    if isinstance(branches, Form) and branches.rows is not None:
        joined = joined_rows(ctx, operands_of(ctx), (0, 1, 2))
        return replace(joined, factors=branches.factors) if isinstance(joined, Form) else joined
    return branches


def _rows_condition(ctx: OpContext) -> Fact:
    """Returns rows selected from both branches; their scales must agree, except for zeros."""
    operands = operands_of(ctx)
    joined = joined_rows(ctx, operands, (0, 1, 2))
    if isinstance(joined, UnknownFact):
        return joined
    scale = common_scale(ctx, {1: operands[1], 2: operands[2]})
    return scale if isinstance(scale, UnknownFact) else replace(joined, factors=scale)


def _select_rows(ctx: OpContext) -> Fact:
    """Select (version 1): a vector that selects rows of the first axis."""
    operands = operands_of(ctx)
    branches = add_operands(ctx, (1, 2))
    condition = operands[0]
    if isinstance(branches, Form) and isinstance(condition, Form):
        if condition.is_replicated and (branches.rows is None or branches.rows.axis != 0):
            return branches
        if branches.rows is not None and condition.rows is not None and branches.rows.axis == 0:
            if same_rows(condition.rows, branches.rows):
                return branches
    return ctx.unknown("its condition and its branches do not have the examples along the same axis")


def _guarded_quotient(ctx: OpContext) -> Fact | None:
    """`where(s > 0, a / s, 0)`: guards replicas on which the divisor is zero; their weight is then zero too.

    A guard by `>` requires that s cannot be negative.
    """
    guard = guard_of(ctx)
    value = None if guard is None else operands_of(ctx, (guard.nonzero,))[0]
    if guard is None or not isinstance(value, Form) or value.base is not Base.REPLICATED:
        return None
    return value if dict(value.factors).get(guard.factor) == -1 and ctx.is_zero(guard.zero) else None


def extremum(ctx: OpContext) -> Fact:
    """Maximum, Minimum: of two equal lengths, either."""
    counted = _equal_lengths(ctx)
    return nonlinear(ctx) if counted is None else counted


def _equal_lengths(ctx: OpContext) -> Dims | None:
    """Returns the maximum or minimum of two equal lengths; None if they may differ."""
    first, second = ctx.facts
    if isinstance(first, Dims) and isinstance(second, Dims) and first.is_scalar and first.forms == second.forms:
        counted = length(ctx, 0)
        return first if isinstance(counted, Sharded) and counted == length(ctx, 1) else None
    return None


RULES: dict[str, Rule] = {
    **dict.fromkeys(["Select", "SelectV2"], select),
    **dict.fromkeys(["Maximum", "Minimum"], extremum),
}
