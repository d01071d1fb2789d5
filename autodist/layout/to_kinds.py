"""Converts facts, the internal results of propagation, to kinds."""

from __future__ import annotations

from autodist.layout.factors import NONE, Count, Factor, Factors, PartialSum, additive_over, describe, power
from autodist.layout.facts import (
    Base,
    Dims,
    Extremum,
    Fact,
    Form,
    Recovery,
    SelectedByPosition,
    Sharded,
    Statistic,
    UnknownFact,
    form_of,
)
from autodist.layout.kinds import (
    BatchShaped,
    ByPosition,
    Kind,
    Lengths,
    Mean,
    PerExample,
    Reduced,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
    Weight,
)


def kind_of(fact: Fact) -> Kind:
    """Returns the kind for a fact, with the weight of a mean."""
    if isinstance(fact, Extremum):
        return Reduced(fact.reason, fact.by, fact.mixed_at)
    form = form_of(fact)
    if isinstance(form, SelectedByPosition):
        return ByPosition(form.reason, form.whole_up_to)
    if isinstance(form, UnknownFact) and form.recovery is Recovery.BATCH_SHAPED:
        return BatchShaped(form.reason)
    if isinstance(form, (Statistic, UnknownFact)):
        return Lengths(form.reason) if isinstance(fact, Dims) else Unknown(form.reason)
    if form.rows is not None:
        return _kind_of_rows(form, form.rows)
    if form.is_replicated:
        return Replicated()
    return _kind_of_additive(form)


def _kind_of_rows(form: Form, base: Sharded) -> Kind:
    if form.factors:
        return Unknown(f"its rows belong to examples, but each is scaled by {describe(form.factors)}")
    if base.order:
        return Unknown(f"its rows belong to examples, but they are not in their order along axis {base.axis}")
    return PerExample(base.axis, form.mixed_at)


def _kind_of_additive(form: Form) -> Kind:
    if form.base is Base.PARTIAL_SUM:
        weighted = _weights(form.factors)
        if not form.factors:
            return Sum(form.mixed_at)
    else:
        if additive_over(form.factors, NONE):
            return Sum(form.mixed_at)
        weighted = _weights_below(form.factors)
    if len(weighted) == 1 and (weight := weight_of(weighted[0])):
        return Mean(weight, form.mixed_at)
    sums = describe(form.factors)
    return Unknown(f"it is a product of sums over the batch ({sums}), which is neither a sum nor a mean")


def _weights(factors: Factors) -> list[Factor]:
    return [factor for factor, _ in factors] if len(factors) == 1 and next(iter(factors))[1] == -1 else []


def _weights_below(factors: Factors) -> list[Factor]:
    return [f for f, exponent in factors if exponent == -1 and additive_over(factors, power(f, -1))]


def weight_of(factor: Factor) -> Weight | None:
    """Returns the weight for a factor, or None if no graph tensor holds it."""
    if isinstance(factor, Count):
        return factor.of
    if not factor.without:
        return Scalar(factor.tensor)
    below = _weights(factor.without)
    inner = weight_of(below[0]) if below else None
    return Total(factor.tensor, inner) if inner else None


def factor_of(weight: Weight) -> Factor:
    """Returns the factor for a weight; the inverse of `weight_of`."""
    match weight:
        case Scalar(tensor):
            return PartialSum(tensor, NONE)
        case Total(tensor, inner):
            return PartialSum(tensor, power(factor_of(inner), -1))
    return Count(weight)
