"""The batch degree (growth with the batch size) of values without a batch axis: sums, means, functions of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autodist.layout.combine import Operand
from autodist.layout.factors import NONE, Factors, additive_over, power
from autodist.layout.facts import REPLICATED, Base, Form, Recovery, Statistic, UnknownFact
from autodist.layout.op_context import OpContext


def factors_of(operand: Operand) -> Factors:
    """Returns an operand's factors for a product with rows; none for means that are combined per channel."""
    return operand.factors if isinstance(operand, Form) and operand.base is not Base.PARTIAL_SUM else NONE


def is_neutral(ctx: OpContext, operand: Operand, index: int) -> bool:
    return isinstance(operand, Form) and not operand.factors and ctx.is_zero(index)


def common_scale(ctx: OpContext, operands: Mapping[int, Operand]) -> Factors | UnknownFact:
    """Returns the common factors of operands that are added to rows or selected with them; zeros fit any scale."""
    scales = {factors_of(operand) for operand in operands.values() if isinstance(operand, Form)}
    if len(scales) > 1:
        scales = {factors_of(o) for k, o in operands.items() if isinstance(o, Form) and not is_neutral(ctx, o, k)}
    if len(scales) > 1:
        return ctx.unknown("it adds rows of examples to sums or means over the batch, or to rows of another scale")
    return next(iter(scales), NONE)


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


def weakest(operands: Sequence[Operand]) -> UnknownFact | None:
    """Returns the unknown fact that determines the result; None if every operand is known.

    A later rule can recover rows from it (`Recovery`) only if all other operands are replicated.
    """
    unknown = [operand for operand in operands if isinstance(operand, UnknownFact)]
    if not unknown:
        return None
    plain = all(
        isinstance(operand, UnknownFact) or (isinstance(operand, Form) and operand.is_replicated)
        for operand in operands
    )
    recoveries = {operand.recovery for operand in unknown}
    if not plain or Recovery.NEVER in recoveries:
        return UnknownFact(next((o for o in unknown if o.recovery is Recovery.NEVER), unknown[0]).reason)
    keeps = Recovery.BATCH_SHAPED if Recovery.BATCH_SHAPED in recoveries else Recovery.ALWAYS
    return UnknownFact(unknown[0].reason, keeps)


def is_intensive(operand: Operand) -> bool:
    """Returns True if a value without rows is unchanged when every example is duplicated."""
    if isinstance(operand, Form):
        return operand.rows is None and operand.degree == 0
    return isinstance(operand, Statistic)
