"""Combines operands that are divided by examples, by the factor rule of their op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autodist.graph.ops import Factor, FactorRule, factor_rule
from autodist.layout.facts import Base, Form, Recovery, Reordered, Sharded, Statistic, UnknownFact, form_of, with_axis
from autodist.layout.op_context import OpContext

Operand = Form | Statistic | UnknownFact


def operands_of(ctx: OpContext, indices: Sequence[int] | None = None) -> list[Operand]:
    chosen = range(len(ctx.facts)) if indices is None else indices
    return [form_of(ctx.facts[index]) for index in chosen]


def has_rows(operands: Sequence[Operand]) -> bool:
    return any(isinstance(operand, Form) and operand.rows for operand in operands)


@dataclass(frozen=True)
class Divided:
    """The division of an op's operands by examples.

    Attributes:
        rule: the factor rule of the op.
        factor: the factor that is divided.
        rows: the rows of the operands, up to their axes.
        mixed_at: as in `Form`.
    """

    rule: FactorRule
    factor: Factor
    rows: Sharded
    mixed_at: str | None

    def result(self, index: int = 0) -> Sharded | None:
        """Returns the rows of a result; None if the op reduces the factor."""
        axis = self.rule.result_axis(self.factor, index)
        return None if axis is None else replace(self.rows, axis=axis)


def divided(ctx: OpContext, rule: FactorRule | None, operands: Mapping[int, Operand]) -> Divided | UnknownFact:
    """Returns the division of operands, at least one of them with rows, by the factor rule of their op."""
    if rule is None:
        return ctx.unknown("the axes on which it works, or the ranks of its inputs, are not known; set their shapes")
    with_rows = {k: o.rows for k, o in operands.items() if isinstance(o, Form) and o.rows is not None}
    factors = {rule.factor(k, rows.axis) for k, rows in with_rows.items()}
    if len(factors) != 1:
        return ctx.unknown("it combines each example with every other: its inputs have them along different axes")
    [factor] = factors
    if factor is None:
        return ctx.unknown("it needs the axis of the examples whole")
    common: Sharded | None = None
    mixed_at: str | None = None
    for k, rows in with_rows.items():
        paired = (rows, None) if common is None else in_one_order(replace(common, axis=rows.axis), rows)
        if paired is None:
            return ctx.unknown("its inputs have their examples in different orders")
        operand = operands[k]
        common, mixed_at = paired[0], mixed_at or (isinstance(operand, Form) and operand.mixed_at) or paired[1]
    assert common is not None
    home = rule.result_axis(factor)
    for k, operand in operands.items():
        axis = rule.axis(k, factor)
        issue = None if k in with_rows else _check_broadcast(ctx, operand, k, axis, home)
        if isinstance(issue, UnknownFact):
            return issue
        mixed_at = mixed_at or issue
    return Divided(rule, factor, common, mixed_at or None)


def with_result_axis(ctx: OpContext, form: Form, operand: int = 0) -> Form | UnknownFact:
    """Returns the rows of one operand as rows of the result, on the axis that the factor rule of the op gives."""
    rule = factor_rule(ctx)
    factor = None if rule is None or form.rows is None else rule.factor(operand, form.rows.axis)
    axis = None if rule is None or factor is None else rule.result_axis(factor)
    if form.rows is None or axis is None:
        return ctx.unknown("it does not keep the axis of the examples apart, or its axes are not known")
    return with_axis(form, axis)


def joined_rows(ctx: OpContext, operands: Sequence[Operand], indices: Sequence[int]) -> Form | UnknownFact:
    """Returns the rows of an elementwise op's result; factors are omitted: the caller knows their effect."""
    joined = divided(ctx, factor_rule(ctx), dict(zip(indices, operands, strict=True)))
    return joined if isinstance(joined, UnknownFact) else Form(joined.result() or joined.rows, mixed_at=joined.mixed_at)


def same_rows(left: Sharded, right: Sharded) -> bool:
    """Returns True if the rows of two tensors belong to the same examples, along the same axis."""
    return (left.axis, left.count, left.order) == (right.axis, right.count, right.order)


def in_one_order(left: Sharded, right: Sharded) -> tuple[Sharded, str | None] | None:
    """Returns common rows for two tensors of the same examples, and the node that paired different examples, if any.

    Returns None if they do not match. Rows permuted within a shard match rows in the original order.
    """
    known = right if left.per is None else left
    if same_rows(left, right):
        return known, None
    change = permutation_of(left) or permutation_of(right)
    if change is None or not same_rows(_before(left), _before(right)):
        return None
    return _before(known), change.node


def permutation_of(rows: Sharded) -> Reordered | None:
    """Returns the permutation of the examples within their shard; None if they are in the original order."""
    first = next(iter(rows.order), None)
    return first if isinstance(first, Reordered) else None


def _before(rows: Sharded) -> Sharded:
    change = permutation_of(rows)
    return rows if change is None else replace(rows, order=change.before)


def _check_broadcast(
    ctx: OpContext, operand: Operand, index: int, axis: int | None, home: int | None
) -> UnknownFact | str | None:
    """Checks that rows remain rows, or are reduced by example, when combined with an operand that has no rows.

    Args:
        ctx: the op.
        operand: the operand.
        index: its position.
        axis: its axis that meets the rows, if any.
        home: the axis of the rows in the result; None if the op reduces them.

    Returns:
        An unknown fact if they do not, the node that mixes examples, or None if they remain exact.
    """
    shape = ctx.shape(index)
    length = 1 if axis is None else shape[axis]
    if isinstance(operand, UnknownFact):
        if operand.recovery is Recovery.ALWAYS and (axis is None or home is not None):
            return None
        if operand.recovery is Recovery.BATCH_SHAPED and axis == home is not None and length != 1:
            return ctx.node.name
        return UnknownFact(operand.reason)
    if isinstance(operand, Statistic) or operand.base is Base.PARTIAL_SUM:
        is_mean = isinstance(operand, Statistic) or operand.degree == 0
        if is_mean and length == 1 and shape.rank != 0:
            return ctx.node.name
        reason = operand.reason if isinstance(operand, Statistic) else "it combines rows with a sum over the batch"
        return ctx.unknown(reason) if isinstance(operand, Form) else UnknownFact(reason)
    is_repeated = length == 1 or ctx.is_uniform(index)
    if axis is not None and (home is None or not is_repeated):
        return ctx.unknown(
            f"its input '{ctx.inputs[index]}' is replicated but has a length of its own along the batch "
            "axis, so that its elements belong to positions in the batch"
        )
    return None
