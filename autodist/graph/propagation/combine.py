"""Operands that are combined element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autodist.graph.propagation.facts import Base, Form, Recovery, Reordered, Rows, Statistic, UnknownFact, form_of
from autodist.graph.propagation.op_context import OpContext

Operand = Form | Statistic | UnknownFact


def operands_of(ctx: OpContext, indices: Sequence[int] | None = None) -> list[Operand]:
    chosen = range(len(ctx.facts)) if indices is None else indices
    return [form_of(ctx.facts[index]) for index in chosen]


def has_rows(operands: Sequence[Operand]) -> bool:
    return any(isinstance(operand, Form) and operand.rows for operand in operands)


def joined_rows(ctx: OpContext, operands: Sequence[Operand], indices: Sequence[int]) -> Form | UnknownFact:
    """The rows that operands with rows among them make when they are broadcast against one another.

    Factors are left out: the caller knows what its op does to them.
    """
    ranks = [ctx.rank(index) for index in indices]
    if len(operands) > 1 and None in ranks:
        unknown = ctx.inputs[indices[ranks.index(None)]]
        return ctx.opaque(f"the rank of its input '{unknown}' is not known; give that tensor a shape")
    rank = max(value or 0 for value in ranks)
    found: Rows | None = None
    mixed_at: str | None = None
    for operand, own_rank in zip(operands, ranks, strict=True):
        if not isinstance(operand, Form) or operand.rows is None:
            continue
        base = operand.rows
        aligned = base if own_rank is None else replace(base, axis=base.axis + rank - own_rank)
        paired = (aligned, None) if found is None else in_one_order(found, aligned)
        if paired is None:
            return ctx.opaque("its inputs have their examples along different axes or in different orders")
        found, mixed_at = paired[0], mixed_at or operand.mixed_at or paired[1]
    assert found is not None
    for operand, own_rank, index in zip(operands, ranks, indices, strict=True):
        verdict = _beside_rows(ctx, operand, index, found.axis - (rank - (own_rank or 0)), own_rank == rank)
        if isinstance(verdict, UnknownFact):
            return verdict
        mixed_at = mixed_at or verdict
    return Form(found, mixed_at=mixed_at)


def same_rows(left: Rows, right: Rows) -> bool:
    """Whether the rows of two tensors belong to the same examples, along the same axis."""
    return (left.axis, left.count, left.order) == (right.axis, right.count, right.order)


def in_one_order(left: Rows, right: Rows) -> tuple[Rows, str | None] | None:
    """Rows of the same examples as one tensor has them that holds both; and the node that made pairs of examples.

    None where they do not belong together: those in another order within a part meet those that are in none.
    """
    told = right if left.per is None else left
    if same_rows(left, right):
        return told, None
    change = change_of_places(left) or change_of_places(right)
    if change is None or not same_rows(_before(left), _before(right)):
        return None
    return _before(told), change.node


def change_of_places(rows: Rows) -> Reordered | None:
    """How the examples have changed places within their part; None where they have not."""
    first = next(iter(rows.order), None)
    return first if isinstance(first, Reordered) else None


def _before(rows: Rows) -> Rows:
    change = change_of_places(rows)
    return rows if change is None else replace(rows, order=change.before)


def _beside_rows(
    ctx: OpContext, operand: Operand, index: int, position: int, same_rank: bool
) -> UnknownFact | str | None:
    """Whether rows stay rows beside this operand: a refusal, the node that mixes examples, or None for "yes"."""
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
    if isinstance(operand, Statistic) or operand.base is Base.ADDED:
        is_mean = isinstance(operand, Statistic) or operand.degree == 0
        if is_mean and length == 1 and shape.rank != 0:
            return ctx.node.name
        reason = operand.reason if isinstance(operand, Statistic) else "rows are combined with a sum over the batch"
        return ctx.opaque(reason) if isinstance(operand, Form) else UnknownFact(reason)
    if length != 1 and not ctx.is_uniform(index):
        return ctx.opaque(
            f"its input '{ctx.inputs[index]}' is the same on all replicas but has a length of its own along the "
            "batch axis, so that its elements belong to positions in the batch"
        )
    return None


def weakest(operands: Sequence[Operand]) -> UnknownFact | None:
    """The opaque operand that speaks for all, if there is one and no rows stand beside it."""
    opaque = [operand for operand in operands if isinstance(operand, UnknownFact)]
    if not opaque:
        return None
    plain = all(
        isinstance(operand, UnknownFact) or (isinstance(operand, Form) and operand.is_same) for operand in operands
    )
    recoveries = {operand.recovery for operand in opaque}
    if not plain or Recovery.NEVER in recoveries:
        return UnknownFact(next((o for o in opaque if o.recovery is Recovery.NEVER), opaque[0]).reason)
    keeps = Recovery.BATCH_SHAPED if Recovery.BATCH_SHAPED in recoveries else Recovery.ALWAYS
    return UnknownFact(opaque[0].reason, keeps)


def is_intensive(operand: Operand) -> bool:
    """Whether a value without rows stays what it is when every example is there twice."""
    if isinstance(operand, Form):
        return operand.rows is None and operand.degree == 0
    return isinstance(operand, Statistic)
