"""Rules for elementwise ops: sums keep layouts, products multiply factors, all other ops keep rows only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

from autodist.graph.ops import ReducedBy, Trait, having
from autodist.layout.by_factors import by_factors, nonlinear
from autodist.layout.combine import has_rows, joined_rows, operands_of
from autodist.layout.coordinates import with_numbers
from autodist.layout.degree import add_forms, common_scale, factors_of, is_neutral, weakest
from autodist.layout.distinct import row_by_row
from autodist.layout.factors import NONE, times
from autodist.layout.facts import REPLICATED, Base, Dims, Extremum, Fact, Form, Statistic, UnknownFact
from autodist.layout.lengths import is_same_length, length, whole_quotient
from autodist.layout.op_context import OpContext, Rule, op_names
from autodist.layout.vanishing import differs_where_zero, guarded_count, is_summed, vanish_with


def linear(ctx: OpContext) -> Fact:
    """f(x) = c·x: returns the input's fact unchanged, also for shapes and lists."""
    return ctx.facts[0]


def outputs_of_inputs(ctx: OpContext) -> list[Fact]:
    """IdentityN: each output has the fact of its input."""
    return list(ctx.facts)


def negate(ctx: OpContext) -> Fact:
    fact = ctx.facts[0]
    if isinstance(fact, Extremum):
        return replace(fact, by=_NEGATED[fact.by]) if fact.by in _NEGATED else nonlinear(ctx)
    return replace(fact, values=(None,) * len(fact.values)) if isinstance(fact, Dims) else fact


def cast(ctx: OpContext) -> Fact:
    """Cast: keeps sums unless it rounds."""
    from tensorflow import dtypes

    fact = ctx.facts[0]
    source = dtypes.as_dtype(ctx.node.attr["SrcT"].type)
    target = dtypes.as_dtype(ctx.node.attr["DstT"].type)
    if isinstance(fact, Dims):
        return fact if target.is_integer else operands_of(ctx)[0]
    if isinstance(fact, Extremum):
        keeps_order = not (target.is_bool or target.is_unsigned or target.is_complex or source.is_complex)
        return fact if keeps_order and fact.by in _NEGATED else nonlinear(ctx)
    if target.is_bool or (target.is_integer and (source.is_floating or source.is_complex)):
        return nonlinear(ctx)
    return fact


def reciprocal(ctx: OpContext) -> Fact:
    """1 / x: inverts the factors."""
    operand = operands_of(ctx)[0]
    if isinstance(operand, Form) and operand.base is not Base.PARTIAL_SUM:
        return replace(operand, factors=times(NONE, operand.factors, -1))
    return nonlinear(ctx)


def square(ctx: OpContext) -> Fact:
    operand = operands_of(ctx)[0]
    if isinstance(operand, Form) and operand.base is Base.REPLICATED and operand.factors:
        return replace(operand, factors=times(operand.factors, operand.factors))
    return nonlinear(ctx)


def floor_divide(ctx: OpContext) -> Fact | list[Fact]:
    """Floor division: exact for replicated values, such as the elements of a row; a count of rows may be rounded."""
    if ctx.rank(0) == ctx.rank(1) == 0 and (number := whole_quotient(length(ctx, 0), length(ctx, 1))) is not None:
        return Dims((REPLICATED,), (number,), is_scalar=True)
    return with_values(lambda left, right: left // right if right else None, nonlinear)(ctx)


def divide(ctx: OpContext) -> Fact:
    """A quotient: of factors, too. That of two sums is a mean if the dividend is zero where the divisor is."""
    left, right = operands = operands_of(ctx)
    counted = guarded_count(ctx, 1)
    if counted is not None and vanish_with(ctx, 0, times(NONE, counted.factors, -1)):
        right, operands = counted, [left, counted]
    if has_rows(operands):
        form = joined_rows(ctx, operands, (0, 1))
        if isinstance(form, UnknownFact):
            return form
        return replace(form, factors=times(factors_of(left), factors_of(right), -1))
    if isinstance(left, Form) and isinstance(right, Form):
        if right.base is Base.REPLICATED:
            factors = times(left.factors, right.factors, -1)
            if is_summed(left) and not vanish_with(ctx, 0, factors):
                return differs_where_zero(ctx, left, right, -1)
            return Form(left.base, factors, left.mixed_at or right.mixed_at)
        if left.degree == right.degree:
            return Statistic(ctx.unknown("it is a quotient of sums over the batch that are not scalars").reason)
        return ctx.unknown("it is a quotient of sums over the batch that are not scalars")
    return nonlinear(ctx)


def multiply(ctx: OpContext) -> Fact | list[Fact]:
    """A product: of factors, too. A sum times 1 / count is a mean if the sum is zero where the count is."""
    operands = operands_of(ctx)
    for index, other in ((0, operands[1]), (1, operands[0])):
        if is_summed(operand := operands[index]) and isinstance(other, Form) and other.rows is None:
            if not vanish_with(ctx, index, other.factors):
                return differs_where_zero(ctx, operand, other)
    return by_factors(ctx)


def subtract(ctx: OpContext) -> Fact | list[Fact]:
    """Sub: also of two shapes."""
    left = _shape_difference(ctx)
    return with_values(operator.sub)(ctx) if left is None else left


def _shape_difference(ctx: OpContext) -> Dims | None:
    """Returns the difference of two shapes if it is replicated along every axis, else None."""
    left, right = ctx.dims(0), ctx.dims(1)
    if left is None or right is None or left.is_scalar or right.is_scalar or len(left.forms) != len(right.forms):
        return None
    values: list[int | None] = []
    for axis, forms in enumerate(zip(left.forms, right.forms, strict=True)):
        one, other = left.values[axis], right.values[axis]
        if forms == (REPLICATED, REPLICATED):
            values.append(one - other if one is not None and other is not None else None)
        elif (counted := length(ctx, 0, axis)) is not None and is_same_length(counted, length(ctx, 1, axis)):
            values.append(0)
        else:
            return None
    return Dims((REPLICATED,) * len(values), tuple(values))


def add_operands(ctx: OpContext, indices: Sequence[int]) -> Fact:
    """Returns the layout of the sum of some inputs, or of a choice between them; zeros fit any layout."""
    operands = operands_of(ctx, indices)
    if has_rows(operands):
        form = joined_rows(ctx, operands, indices)
        if isinstance(form, UnknownFact):
            return form
        scale = common_scale(ctx, dict(zip(indices, operands, strict=True)))
        return scale if isinstance(scale, UnknownFact) else replace(form, factors=scale)
    unknown = weakest(operands)
    if unknown is not None:
        return unknown
    return add_forms(ctx, [o for o, k in zip(operands, indices, strict=True) if not is_neutral(ctx, o, k)])


def with_values(function: Callable[[int, int], int | None], rule: Rule = by_factors) -> Rule:
    """Extends a rule to integers of shapes, which remain `Dims`, with their values if both operands are known."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        fact = rule(ctx)
        if not isinstance(fact, Form) or fact.rows is not None or not any(isinstance(f, Dims) for f in ctx.facts):
            return fact
        dims = [ctx.dims(index) for index in range(len(ctx.facts))]
        if len(dims) != 2 or not all(entry is not None and entry.is_scalar for entry in dims):
            return fact
        a, b = (entry.values[0] for entry in dims if entry is not None)
        return Dims((fact,), (function(a, b) if a is not None and b is not None else None,), True)

    return apply


_NEGATED = {ReducedBy.MAX: ReducedBy.MIN, ReducedBy.MIN: ReducedBy.MAX}

RULES: dict[str, Rule] = {
    **dict.fromkeys([*having(Trait.ELEMENTWISE), "Bitcast"], row_by_row(by_factors)),
    **dict.fromkeys(having(Trait.IDENTITY | Trait.CHECKS), linear),
    **dict.fromkeys(op_names("EnsureShape Real Imag Conj DebugIdentity DebugIdentityV2"), linear),
    **dict.fromkeys(["Add", "AddV2", "AddN", "AccumulateNV2"], with_numbers(row_by_row(with_values(operator.add)))),
    "Sub": with_numbers(row_by_row(subtract)),
    **dict.fromkeys(having(Trait.PRODUCT), with_numbers(row_by_row(with_values(operator.mul, multiply)))),
    **dict.fromkeys(having(Trait.QUOTIENT), row_by_row(divide)),
    **dict.fromkeys(having(Trait.WHOLE_QUOTIENT), floor_divide),
    **dict.fromkeys(op_names("Reciprocal Inv"), reciprocal),
    "IdentityN": outputs_of_inputs,
    "Neg": negate,
    "Square": square,
    "Cast": cast,
}
