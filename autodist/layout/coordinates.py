"""Coordinates computed by arithmetic on row indices: [row index, …], used to scatter."""

from __future__ import annotations

import numpy as np

from autodist.graph.ops import Trait, having
from autodist.layout.facts import REPLICATED, Coordinates, Fact, Form, Positions, form_of
from autodist.layout.op_context import OpContext, Rule, tensor_name

_SAME_ELEMENTS = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS | Trait.REPEATS)


def with_numbers(rule: Rule) -> Rule:
    """Extends a rule for products and sums to coordinates: n[:, None] * [1, 0, 0], and offsets added to them."""

    def apply(ctx: OpContext) -> Fact | list[Fact]:
        for index, fact in enumerate(ctx.facts):
            if isinstance(fact, Positions) and ctx.node.op == "Mul" and _is_column_by_unit_vector(ctx, index):
                return Coordinates(fact)
            if isinstance(fact, Positions) and ctx.node.op == "Mul" and _are_ones(ctx, fact, 1 - index):
                return fact
            if isinstance(fact, Coordinates) and ctx.node.op in having(Trait.ADDITION) and _is_offset(ctx, 1 - index):
                return fact
        return rule(ctx)

    return apply


def _are_ones(ctx: OpContext, positions: Positions, index: int) -> bool:
    """Returns True if the indices are multiplied by a vector of ones, as in `tf.meshgrid`."""
    form = form_of(ctx.facts[index])
    fits = isinstance(form, Form) and not form.factors and form.base == positions.entries
    return fits and ctx.rank(0) == ctx.rank(1) == 1 and ctx.is_filled_with(index, 1)


def _is_column_by_unit_vector(ctx: OpContext, index: int) -> bool:
    """Returns True if a column of indices is multiplied by [1, 0, …]."""
    shape, factors = ctx.shape(index), ctx.constant(1 - index)
    is_column = shape.rank == 2 and shape[1] == 1
    return (
        is_column and factors is not None and factors.ndim == 1 and factors.tolist() == [1] + [0] * (factors.size - 1)
    )


def _is_offset(ctx: OpContext, index: int) -> bool:
    """Returns True if the addend holds positions within examples, and zeros in the column of row indices."""
    form = form_of(ctx.facts[index])
    of_examples = isinstance(form, Form) and form.rows is not None and form.rows.axis == 0
    is_known = isinstance(form, Form) and not form.factors and (form == REPLICATED or of_examples)
    return is_known and _begins_with_zero(ctx, ctx.inputs[index])


def _begins_with_zero(ctx: OpContext, tensor: str) -> bool:
    """Returns True if the first element along a tensor's last axis is always zero."""
    value = ctx.scope.constant(tensor)
    if value is not None:
        return value.ndim > 0 and not np.any(value[..., 0])
    node = ctx.scope.producer(tensor)
    rank = ctx.scope.shape(tensor).rank
    if node is None or rank is None:
        return False
    source = tensor_name(node.input[0])
    if node.op == "Pack" and node.attr["axis"].i in (rank - 1, -1):
        return OpContext(node, [source], [], ctx.scope).is_zero(0)
    if node.op not in _SAME_ELEMENTS or not _keeps_last_axis(ctx, node.op, tensor, source):
        return False
    return _begins_with_zero(ctx, source)


def _keeps_last_axis(ctx: OpContext, op: str, tensor: str, source: str) -> bool:
    """Returns True if the last axis is that of the source, neither added nor repeated."""
    lengths = [ctx.scope.shape(name) for name in (tensor, source)]
    if op == "ExpandDims":
        node = ctx.scope.producer(tensor)
        axis = None if node is None else ctx.scope.constant(tensor_name(node.input[1]))
        return axis is not None and 0 <= int(axis) < (lengths[1].rank or 0)
    return bool(lengths[0].rank and lengths[1].rank) and lengths[0][-1] == lengths[1][-1] is not None


def expanded(ctx: OpContext, coordinates: Coordinates) -> Fact:
    """ExpandDims: adds an axis between the examples and the coordinates."""
    axis, rank = ctx.scalar(1), ctx.rank(0)
    if axis is not None and rank is not None and 1 <= (axis if axis >= 0 else axis + rank + 1) < rank:
        return coordinates
    return ctx.unknown("it moves the coordinates away from its last axis")
