"""The rule of all ops without one of their own: factor rules and linear operands determine it.

The factor rule of the op decides where the result is: its axis of examples, or the reduction over them. The operands in
which the op is linear decide the batch degree.
"""

from __future__ import annotations

from collections.abc import Mapping

from autodist.graph.ops import FactorRule, ReducedBy, Trait, factor_rule, having, linear_operands
from autodist.layout.combine import Divided, Operand, divided, has_rows
from autodist.layout.degree import add_forms, common_scale, factors_of, is_intensive, is_neutral, weakest
from autodist.layout.factors import NONE, Factors, describe, power, times
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Extremum,
    Fact,
    Form,
    Statistic,
    UnknownFact,
    form_of,
    is_noise,
)
from autodist.layout.op_context import OpContext
from autodist.layout.vanishing import NO_WEIGHT, vanish_with

_SUMS = having(Trait.REDUCES) & having(Trait.COMBINES)
"""Reductions whose results are sums or means."""

NO_SUM = "it reduces over the batch, which is neither a sum nor a mean"

_Linear = tuple[tuple[int, ...], bool]
"""The operands in which an op is linear; True if in each separately."""


def by_factors(ctx: OpContext) -> Fact | list[Fact]:
    """Returns the layouts of an op's results by its factor rule and its linear operands."""
    positions, apart = linear_operands(ctx.node.op, len(ctx.inputs)) or ((), False)
    return _apply(ctx, (tuple(positions), apart))


def nonlinear(ctx: OpContext) -> Fact:
    """Returns the layout of a function of its operands that keeps rows and replicated values, but no sums and means."""
    result = _apply(ctx, ((), False))
    return result[0] if isinstance(result, list) else result


def _apply(ctx: OpContext, linear: _Linear) -> Fact | list[Fact]:
    rule = factor_rule(ctx)
    if rule is None:
        at = list(linear[0]) or list(range(len(ctx.facts)))
    else:
        at = [k for k, axes in enumerate(rule.operands) if axes is not None]
    data = {k: form_of(ctx.facts[k]) for k in at}
    if not has_rows(list(data.values())):
        unlike = None if rule is None or weakest(list(data.values())) else _unlike_parameter(ctx, rule)
        return unlike or _without_rows(ctx, data, linear)
    joined = divided(ctx, rule, data)
    if isinstance(joined, UnknownFact):
        return joined
    scale = _scale(ctx, data, linear)
    if isinstance(scale, UnknownFact):
        return scale
    unlike = _unlike_parameter(ctx, joined.rule, joined)
    if unlike is not None:
        return unlike
    results = [_result(ctx, joined, scale, index) for index in range(len(joined.rule.results))]
    return results if len(results) > 1 else results[0]


def _unlike_parameter(ctx: OpContext, rule: FactorRule, joined: Divided | None = None) -> UnknownFact | None:
    """Returns the unknown fact for an operand without factors that differs between replicas; None if there is none.

    All examples of a shard may share noise. Lengths differ between replicas along the axis of the examples.
    """
    for index, axes in enumerate(rule.operands):
        fact = ctx.facts[index]
        if index in rule.lengths:
            dims, axis = ctx.dims(index), None if joined is None else rule.result_axis(joined.factor)
            if dims is None or not all(form.is_replicated for k, form in enumerate(dims.forms) if k != axis):
                return ctx.unknown("the lengths of its result are not known")
        elif axes is None and form_of(fact) != REPLICATED and not (joined is not None and is_noise(fact)):
            return (
                UnknownFact(fact.reason)
                if isinstance(fact, UnknownFact)
                else ctx.unknown("its parameters are not replicated")
            )
    return None


def _scale(ctx: OpContext, operands: Mapping[int, Operand], linear: _Linear) -> Factors | UnknownFact:
    """Returns the factors of a result with rows."""
    positions, apart = linear
    scaled = [factors for k, o in operands.items() if k not in positions and (factors := factors_of(o))]
    if scaled:
        return ctx.unknown(f"it is not linear in a value that is scaled by {describe(scaled[0])}")
    if apart:
        product = NONE
        for k in positions:
            product = times(product, factors_of(operands[k]))
        return product
    return common_scale(ctx, {k: operands[k] for k in positions})


def _result(ctx: OpContext, joined: Divided, scale: Factors, index: int) -> Fact:
    rows, reduced = joined.result(index), joined.rule.reduced
    if rows is not None:
        return Form(rows, scale, joined.mixed_at)
    if reduced is ReducedBy.MEAN:
        scale = times(scale, power(joined.rows.count, 1), -1)
    if ctx.node.op in _SUMS and not vanish_with(ctx, 0, scale):
        return ctx.unknown(NO_WEIGHT)
    if reduced in (ReducedBy.SUM, ReducedBy.MEAN):
        return _summed(ctx, Form(Base.PARTIAL_SUM, scale, joined.mixed_at), index)
    unknown = ctx.unknown(NO_SUM)
    return unknown if reduced is None or scale else Extremum(reduced, unknown.reason, joined.mixed_at)


def _summed(ctx: OpContext, form: Form, index: int = 0) -> Form:
    is_scalar = form.base is Base.PARTIAL_SUM and ctx.output_shape(index).rank == 0
    return ctx.additive(form, index) if is_scalar else form


# -- without a batch axis ----------------------------------------------------------------------------------------------


def _without_rows(ctx: OpContext, operands: Mapping[int, Operand], linear: _Linear) -> Fact:
    unknown = weakest(list(operands.values()))
    if unknown is not None:
        return unknown
    positions, apart = linear
    if all(isinstance(o, Form) and o.is_replicated for k, o in operands.items() if k not in positions):
        parts = {k: operands[k] for k in positions}
        if len(parts) == 1 or apart:
            form = _product(list(parts.values()))
            if form is not None:
                return _summed(ctx, form) if isinstance(form, Form) else form
        elif parts:
            return add_forms(ctx, [o for k, o in parts.items() if not is_neutral(ctx, o, k)])
    if all(isinstance(o, Form) and o.is_replicated for o in operands.values()):
        return REPLICATED
    if all(map(is_intensive, operands.values())):
        return Statistic(ctx.unknown("it is a function of means over the batch that is not itself a mean").reason)
    return ctx.unknown("it is a function of sums over the batch that is no sum")


def _product(operands: list[Operand]) -> Form | Statistic | None:
    """Returns the product of operands, at most one of them a sum that is not a scalar; None for any others."""
    if len(operands) == 1 and isinstance(operands[0], Statistic):
        return operands[0]
    forms = [operand for operand in operands if isinstance(operand, Form)]
    if len(forms) < len(operands) or sum(form.base is Base.PARTIAL_SUM for form in forms) > 1:
        return None
    factors = NONE
    for form in forms:
        factors = times(factors, form.factors)
    base = Base.PARTIAL_SUM if any(form.base is Base.PARTIAL_SUM for form in forms) else Base.REPLICATED
    return Form(base, factors, next((form.mixed_at for form in forms if form.mixed_at), None))
