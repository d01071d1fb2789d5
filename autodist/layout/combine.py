"""Combines operands elementwise, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autodist.layout.facts import Base, Form, Recovery, Reordered, Sharded, Statistic, UnknownFact, form_of
from autodist.layout.op_context import OpContext

Operand = Form | Statistic | UnknownFact


def operands_of(ctx: OpContext, indices: Sequence[int] | None = None) -> list[Operand]:
    chosen = range(len(ctx.facts)) if indices is None else indices
    return [form_of(ctx.facts[index]) for index in chosen]


def has_rows(operands: Sequence[Operand]) -> bool:
    return any(isinstance(operand, Form) and operand.rows for operand in operands)


def joined_rows(ctx: OpContext, operands: Sequence[Operand], indices: Sequence[int]) -> Form | UnknownFact:
    """Returns the rows that result from broadcasting operands, at least one of them with rows.

    Factors are omitted: the caller knows their effect in its op.
    """
    ranks = [ctx.rank(index) for index in indices]
    if len(operands) > 1 and None in ranks:
        unknown = ctx.inputs[indices[ranks.index(None)]]
        return ctx.unknown(f"the rank of its input '{unknown}' is not known; set that tensor's shape")
    rank = max(value or 0 for value in ranks)
    result: Sharded | None = None
    mixed_at: str | None = None
    for operand, operand_rank in zip(operands, ranks, strict=True):
        if not isinstance(operand, Form) or operand.rows is None:
            continue
        base = operand.rows
        aligned = base if operand_rank is None else replace(base, axis=base.axis + rank - operand_rank)
        paired = (aligned, None) if result is None else in_one_order(result, aligned)
        if paired is None:
            return ctx.unknown("its inputs have their examples along different axes or in different orders")
        result, mixed_at = paired[0], mixed_at or operand.mixed_at or paired[1]
    assert result is not None
    for operand, operand_rank, index in zip(operands, ranks, indices, strict=True):
        issue = _check_broadcast(ctx, operand, index, result.axis - (rank - (operand_rank or 0)), operand_rank == rank)
        if isinstance(issue, UnknownFact):
            return issue
        mixed_at = mixed_at or issue
    return Form(result, mixed_at=mixed_at)


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
    ctx: OpContext, operand: Operand, index: int, position: int, same_rank: bool
) -> UnknownFact | str | None:
    """Checks that rows remain rows when combined with this operand.

    Returns an unknown fact if they do not, the node that mixes examples, or None if they remain exact.
    """
    if isinstance(operand, Form) and operand.rows is not None:
        return None
    shape = ctx.shape(index)
    length = shape[position] if position >= 0 else 1
    if isinstance(operand, UnknownFact):
        if operand.recovery is Recovery.ALWAYS:
            return None
        if operand.recovery is Recovery.BATCH_SHAPED and same_rank and length != 1:
            return ctx.node.name
        return UnknownFact(operand.reason)
    if isinstance(operand, Statistic) or operand.base is Base.PARTIAL_SUM:
        is_mean = isinstance(operand, Statistic) or operand.degree == 0
        if is_mean and length == 1 and shape.rank != 0:
            return ctx.node.name
        reason = operand.reason if isinstance(operand, Statistic) else "it combines rows with a sum over the batch"
        return ctx.unknown(reason) if isinstance(operand, Form) else UnknownFact(reason)
    if length != 1 and not ctx.is_uniform(index):
        return ctx.unknown(
            f"its input '{ctx.inputs[index]}' is replicated but has a length of its own along the batch "
            "axis, so that its elements belong to positions in the batch"
        )
    return None


def weakest(operands: Sequence[Operand]) -> UnknownFact | None:
    """Returns the unknown fact that determines the result; None if every operand is known.

    It is recoverable only if all other operands are replicated.
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
