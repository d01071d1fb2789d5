"""Rules for elementwise ops: sums keep layouts, products multiply factors, all other ops keep rows only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.layout.combine import (
    Operand,
    has_rows,
    is_intensive,
    joined_rows,
    operands_of,
    weakest,
)
from autodist.layout.coordinates import with_numbers
from autodist.layout.distinct import row_by_row
from autodist.layout.factors import NONE, Factors, additive_over, describe, power, times
from autodist.layout.facts import REPLICATED, Base, Dims, Extremum, Fact, Form, Statistic, UnknownFact
from autodist.layout.kinds import ReducedBy
from autodist.layout.lengths import is_same_length, length, whole_quotient
from autodist.layout.op_context import OpContext, Rule, op_names


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


def bitcast(ctx: OpContext) -> Fact:
    """Bitcast: elementwise if both dtypes have the same size; Keras uses it for argmax."""
    from tensorflow import dtypes

    source, target = (dtypes.as_dtype(ctx.node.attr[name].type) for name in ("T", "type"))
    return nonlinear(ctx) if source.size == target.size else ctx.unknown("it changes the size of the elements")


def nonlinear(ctx: OpContext, indices: Sequence[int] | None = None) -> Fact:
    """Any elementwise function: keeps rows and replicated values; sums and means become unknown."""
    chosen = list(range(len(ctx.facts))) if indices is None else list(indices)
    operands = operands_of(ctx, chosen)
    scaled = [o for o in operands if isinstance(o, Form) and o.factors and (o.rows or o.base is Base.REPLICATED)]
    if has_rows(operands):
        if scaled:
            return ctx.unknown(f"it is not linear in a value that is scaled by {describe(scaled[0].factors)}")
        return joined_rows(ctx, operands, chosen)
    unknown = weakest(operands)
    if unknown is not None:
        return unknown
    if all(isinstance(operand, Form) and operand.is_replicated for operand in operands):
        return REPLICATED
    if all(map(is_intensive, operands)):
        return Statistic(ctx.unknown("it is a function of means over the batch that is not itself a mean").reason)
    return ctx.unknown("it is a function of sums over the batch that is no sum")


def multiply(ctx: OpContext) -> Fact:
    return _with_values(ctx, _product(ctx, 1), lambda left, right: left * right)


def divide(ctx: OpContext) -> Fact:
    return _product(ctx, -1)


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


def floor_divide(ctx: OpContext) -> Fact:
    """Floor division: exact for replicated values, such as the elements of a row; a count of rows may be rounded."""
    if ctx.rank(0) == ctx.rank(1) == 0 and (number := whole_quotient(length(ctx, 0), length(ctx, 1))) is not None:
        return Dims((REPLICATED,), (number,), is_scalar=True)
    return _with_values(ctx, nonlinear(ctx), lambda left, right: left // right if right else None)


def _product(ctx: OpContext, sign: int) -> Fact:
    left, right = operands = operands_of(ctx)
    if has_rows(operands):
        form = joined_rows(ctx, operands, (0, 1))
        if isinstance(form, UnknownFact):
            return form
        return replace(form, factors=times(factors_of(left), factors_of(right), sign))
    unknown = weakest(operands)
    if unknown is not None:
        return unknown
    if isinstance(left, Form) and isinstance(right, Form):
        if right.base is Base.REPLICATED or (left.base is Base.REPLICATED and sign == 1):
            base = Base.PARTIAL_SUM if Base.PARTIAL_SUM in (left.base, right.base) else Base.REPLICATED
            mixed_at = left.mixed_at or right.mixed_at
            return Form(base, times(left.factors, right.factors, sign), mixed_at)
        if left.degree + sign * right.degree == 0:
            return Statistic(ctx.unknown("it is a quotient of sums over the batch that are not scalars").reason)
        return ctx.unknown("it is a product or quotient of sums over the batch that are not scalars")
    return nonlinear(ctx)


def factors_of(operand: Operand) -> Factors:
    """Returns an operand's factors for a product with rows; none for means that are combined per channel."""
    return operand.factors if isinstance(operand, Form) and operand.base is not Base.PARTIAL_SUM else NONE


def add(ctx: OpContext) -> Fact:
    """Add, Sub, AddN."""
    if ctx.node.op == "Sub" and (left := _shape_difference(ctx)) is not None:
        return left
    total = add_operands(ctx, list(range(len(ctx.facts))))
    if ctx.node.op in ("Sub",):
        return _with_values(ctx, total, lambda left, right: left - right)
    return _with_values(ctx, total, lambda left, right: left + right) if len(ctx.facts) == 2 else total


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
    counted = [o for o, index in zip(operands, indices, strict=True) if not is_neutral(ctx, o, index)]
    if has_rows(operands):
        form = joined_rows(ctx, operands, indices)
        scales = {factors_of(operand) for operand in counted if isinstance(operand, Form)}
        if isinstance(form, UnknownFact) or len(scales) <= 1:
            return form if isinstance(form, UnknownFact) else replace(form, factors=next(iter(scales), NONE))
        return ctx.unknown("it adds rows of examples to sums or means over the batch, or to rows of another scale")
    unknown = weakest(operands)
    if unknown is not None:
        return unknown
    return add_forms(ctx, counted)


def is_neutral(ctx: OpContext, operand: Operand, index: int) -> bool:
    return isinstance(operand, Form) and not operand.factors and ctx.is_zero(index)


def add_forms(ctx: OpContext, operands: Sequence[Operand], output: int = 0) -> Form | Statistic | UnknownFact:
    """Returns the common layout of operands without rows: all are partial sums, or all are means of one weight."""
    if not operands:
        return REPLICATED
    total = operands[0]
    for operand in operands[1:]:
        joined = (
            _add_pair(ctx, total, operand, output) if isinstance(total, Form) and isinstance(operand, Form) else None
        )
        if joined is None:
            return _unknown_sum(ctx, operands)
        total = joined
    return total


def _add_pair(ctx: OpContext, left: Form, right: Form, output: int) -> Form | None:
    mixed_at = left.mixed_at or right.mixed_at
    if left.base is Base.REPLICATED and right.base is Base.REPLICATED and left.factors == right.factors:
        return replace(left, mixed_at=mixed_at)
    for rest in _common_rests(left, right):
        if _adds_over(left, rest) and _adds_over(right, rest):
            if ctx.output_shape(output).rank == 0:
                return ctx.additive(Form(factors=rest, mixed_at=mixed_at), output)
            return Form(Base.PARTIAL_SUM, rest, mixed_at)
    return None


def _common_rests(left: Form, right: Form) -> list[Factors]:
    """Returns the factors that may be divided out so that both operands are partial sums: none, or one weight."""
    below = [f for form in (left, right) for f, exponent in form.factors if exponent < 0]
    rests = [form.factors for form in (left, right) if form.base is Base.PARTIAL_SUM]
    return [*rests, NONE, *(power(factor, -1) for factor in below)]


def _adds_over(form: Form, rest: Factors) -> bool:
    if form.base is Base.PARTIAL_SUM:
        return form.factors == rest
    return additive_over(form.factors, rest) is not None


def _unknown_sum(ctx: OpContext, operands: Sequence[Operand]) -> Statistic | UnknownFact:
    if all(map(is_intensive, operands)):
        reason = "it adds means over the batch that have different weights, or functions of them"
        return Statistic(ctx.unknown(reason).reason)
    if any(isinstance(operand, Form) and operand.is_replicated for operand in operands):
        return ctx.unknown("it adds a sum over the batch and a term that does not depend on the batch")
    return ctx.unknown("it adds sums and means over the batch that cannot be combined in one way")


def _with_values(ctx: OpContext, fact: Fact, function: Callable[[int, int], int | None]) -> Fact:
    """Keeps integers from shapes as `Dims`, with their values if both are known."""
    if not isinstance(fact, Form) or fact.rows is not None or not any(isinstance(f, Dims) for f in ctx.facts):
        return fact
    left, right = ctx.dims(0), ctx.dims(1)
    if left is None or right is None or not (left.is_scalar and right.is_scalar):
        return fact
    a, b = left.values[0], right.values[0]
    value = function(a, b) if a is not None and b is not None else None
    return Dims((fact,), (value,), True)


_NEGATED = {ReducedBy.MAX: ReducedBy.MIN, ReducedBy.MIN: ReducedBy.MAX}

RULES: dict[str, Rule] = {
    **dict.fromkeys([*having(Trait.ELEMENTWISE), "QuantizeAndDequantizeV2"], row_by_row(nonlinear)),
    **dict.fromkeys(having(Trait.IDENTITY | Trait.CHECKS), linear),
    **dict.fromkeys(op_names("EnsureShape Real Imag Conj DebugIdentity DebugIdentityV2"), linear),
    **dict.fromkeys(op_names("Add AddV2 Sub AddN AccumulateNV2"), with_numbers(row_by_row(add))),
    **dict.fromkeys(having(Trait.PRODUCT), with_numbers(row_by_row(multiply))),
    **dict.fromkeys(having(Trait.QUOTIENT), row_by_row(divide)),
    **dict.fromkeys(having(Trait.WHOLE_QUOTIENT), floor_divide),
    **dict.fromkeys(op_names("Reciprocal Inv"), reciprocal),
    "IdentityN": outputs_of_inputs,
    "Neg": negate,
    "Square": square,
    "Cast": cast,
    "Bitcast": row_by_row(bitcast),
}
