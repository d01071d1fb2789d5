"""Factor rules of elementwise ops and of moves, which depend on attributes, ranks or constants of a node."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.ops.factor_rule import MOST_AXES, Axes, FactorFunction, FactorRule, OpView

# -- elementwise -------------------------------------------------------------------------------------------------------


def elementwise(op: OpView) -> FactorRule | None:
    """Operands are broadcast, with axes aligned from the right."""
    ranks = tuple(op.rank(index) for index in range(len(op.inputs)))
    return _broadcast((MOST_AXES,) if ranks == (None,) else ranks)


@functools.cache
def _broadcast(ranks: tuple[int | None, ...]) -> FactorRule | None:
    axes = tuple(tuple(range(-rank, 0)) for rank in ranks if rank is not None)
    return None if None in ranks else FactorRule(axes, (max(axes, key=len, default=()),))


def bitcast(op: OpView) -> FactorRule | None:
    """Bitcast: elementwise, unless the elements change their size."""
    before, after = (tf.as_dtype(op.node.attr[name].type).size for name in ("T", "type"))
    return elementwise(op) if before == after else None


def select(op: OpView) -> FactorRule | None:
    """Select: a vector selects complete rows."""
    if op.rank(0) != 1 or op.rank(1) in (1, None):
        return elementwise(op)
    axes = tuple(range(op.rank(1) or 0))
    return FactorRule(((0,), axes, axes), (axes,))


def broadcast_to(op: OpView) -> FactorRule | None:
    """BroadcastTo (value, lengths)."""
    rank, lengths = op.rank(0), op.integers(1)
    if rank is None or lengths is None:
        return None
    return FactorRule((tuple(range(-rank, 0)), None), (tuple(range(-len(lengths), 0)),), lengths=(1,))


# -- moves -------------------------------------------------------------------------------------------------------------


def from_left(op: OpView, index: int = 0) -> list[int]:
    """Returns a factor for each axis of an operand."""
    rank = op.rank(index)
    return list(range(MOST_AXES if rank is None else rank))


def of_one_operand(op: OpView, before: Axes, *after: Axes, index: int = 0) -> FactorRule:
    """Returns the rule of an op that has factors in one operand."""
    return FactorRule(tuple(before if k == index else None for k in range(len(op.inputs))), after)


def whole_at(factors: list[int], axes: set[int]) -> Axes:
    return tuple(None if k in axes else k for k in factors)


def transpose(op: OpView) -> FactorRule | None:
    order = op.integers(1)
    if order is None:
        return None
    moved = tuple(None if axis is None else axis % len(order) for axis in order)
    return of_one_operand(op, tuple(k if k in moved else None for k in range(len(order))), moved)


def _with_axis(factors: Axes, axis: int | None, is_rank_known: bool) -> Axes | None:
    """Returns the factors after an axis is added; None if it is unknown where."""
    if axis is None or (axis < 0 and not is_rank_known):
        return None
    axis = axis if axis >= 0 else axis + len(factors) + 1
    return (*factors[:axis], None, *factors[axis:])


def _adds_axis(op: OpView, axis: int | None, operands: int = 1) -> FactorRule | None:
    factors = tuple(from_left(op))
    after = _with_axis(factors, axis, op.rank(0) is not None)
    if after is None:
        return None
    return FactorRule((*[factors] * operands, *[None] * (len(op.inputs) - operands)), (after,))


def expand_dims(op: OpView) -> FactorRule | None:
    return _adds_axis(op, op.scalar(1))


def pack(op: OpView) -> FactorRule | None:
    return _adds_axis(op, op.number("axis"), operands=len(op.inputs))


def one_hot(op: OpView) -> FactorRule | None:
    """OneHot (indices, depth, values): adds an axis, by default as the last one."""
    axis = op.number("axis")
    return _adds_axis(op, len(from_left(op)) if axis == -1 else axis)


def squeeze(op: OpView) -> FactorRule | None:
    """Squeeze of listed axes; without a list, it would also remove the axis of a part of length 1."""
    rank, listed = op.rank(0), op.numbers("squeeze_dims")
    if rank is None or not listed:
        return None
    before = whole_at(from_left(op), {axis % rank for axis in listed})
    return of_one_operand(op, before, tuple(factor for factor in before if factor is not None))


def unpack(op: OpView) -> FactorRule | None:
    rank = op.rank(0)
    if rank is None:
        return None
    before = whole_at(from_left(op), {op.number("axis") % rank})
    return of_one_operand(op, before, tuple(factor for factor in before if factor is not None))


def _along(op: OpView, data: int, axis: int | None) -> FactorRule | None:
    """Returns the rule of an op that works along one axis of an operand, which keeps its axes."""
    rank = op.rank(data)
    if axis is None or rank is None:
        return None
    axes = whole_at(from_left(op, data), {axis % rank})
    return of_one_operand(op, axes, axes, index=data)


def cumulative(op: OpView) -> FactorRule | None:
    """Cumsum and similar ops (value, axis)."""
    return _along(op, 0, op.scalar(1))


def split(op: OpView) -> FactorRule | None:
    """Split (axis, value)."""
    return _along(op, 1, op.scalar(0))


def split_by_sizes(op: OpView) -> FactorRule | None:
    """SplitV (value, sizes, axis)."""
    return _along(op, 0, op.scalar(2))


def concat(op: OpView) -> FactorRule | None:
    """ConcatV2, whose last operand is the axis, and Concat, whose first operand is the axis."""
    at = 0 if op.node.op == "Concat" else len(op.inputs) - 1
    data = [k for k in range(len(op.inputs)) if k != at]
    axis, rank = op.scalar(at), op.rank(data[0])
    if axis is None or rank is None:
        return None
    axes = whole_at(list(range(rank)), {axis % rank})
    return FactorRule(tuple(axes if k in data else None for k in range(len(op.inputs))), (axes,))


def at_axes(index: int) -> FactorFunction:
    """Returns the rule of an op that works along the axes that operand `index` lists: ReverseV2, Roll."""

    def rule(op: OpView) -> FactorRule | None:
        axes = op.axes_listed(index, 0)
        if axes is None or op.rank(0) is None:
            return None
        kept = whole_at(from_left(op), axes)
        return of_one_operand(op, kept, kept)

    return rule


def reverse_sequence(op: OpView) -> FactorRule | None:
    """ReverseSequence (value, lengths): each sequence of the batch has its own length."""
    if op.rank(0) is None:
        return None
    axes = whole_at(from_left(op), {op.number("seq_dim")})
    return FactorRule((axes, (op.number("batch_dim"),)), (axes,))


def pad(op: OpView) -> FactorRule | None:
    """Pad, PadV2, MirrorPad (value, paddings): axes without padding are independent."""
    paddings = op.constant(1)
    if paddings is None:
        return None
    kept = whole_at(list(range(len(paddings))), {axis for axis, ends in enumerate(paddings) if ends.any()})
    return of_one_operand(op, kept, kept)


def tile(op: OpView) -> FactorRule | None:
    """Tile (value, multiples): axes that do not repeat are independent."""
    multiples = op.integers(1)
    if multiples is None:
        return None
    kept = tuple(axis if times == 1 else None for axis, times in enumerate(multiples))
    return of_one_operand(op, kept, kept)


def slice_(op: OpView) -> FactorRule | None:
    """Slice (value, begin, size): axes that are taken whole are independent."""
    begin, size = op.integers(1), op.integers(2)
    if begin is None or size is None:
        return None
    pairs = enumerate(zip(begin, size, strict=True))
    kept = tuple(axis if first == 0 and number == -1 else None for axis, (first, number) in pairs)
    return of_one_operand(op, kept, kept)


@dataclass(frozen=True)
class SlicedAxis:
    """An axis of the operand of a strided slice.

    Attributes:
        entry: the entry of the slice that selects from it; None if the slice has none for it.
        target: the axis of the result where it is, or where it would be if the slice did not remove it.
        shrinks: True if the slice removes it.
    """

    entry: int | None
    target: int
    shrinks: bool = False


def sliced_axes(op: OpView, rank: int | None) -> list[SlicedAxis] | None:
    """Returns the axes of the operand of a StridedSlice (value, begin, end, strides); None if they are unknown."""
    entries = op.shape(1)[0] if op.rank(1) == 1 else None
    if entries is None or rank is None:
        return None
    return list(_sliced_axes(op, rank, entries))


def _sliced_axes(op: OpView, rank: int, entries: int) -> Iterator[SlicedAxis]:
    ellipsis, added, removed = (op.number(f"{mask}_mask") for mask in ("ellipsis", "new_axis", "shrink_axis"))
    source = target = 0
    for entry in range(entries):
        bit = 1 << entry
        if ellipsis & bit:
            later = sum(not added & (1 << k) for k in range(entry + 1, entries))
            for _ in range(rank - source - later):
                yield SlicedAxis(None, target)
                source, target = source + 1, target + 1
        elif added & bit:
            target += 1
        else:
            yield SlicedAxis(entry, target, bool(removed & bit))
            source, target = source + 1, target + (not removed & bit)
    for axis in range(source, rank):
        yield SlicedAxis(None, target + axis - source)


def strided_slice(op: OpView) -> FactorRule | None:
    """StridedSlice: axes that are taken whole are independent."""
    axes, strides = sliced_axes(op, op.rank(0)), op.integers(3)
    if axes is None or strides is None:
        return None
    full = op.number("begin_mask") & op.number("end_mask")
    kept = tuple(
        k if axis.entry is None or (full >> axis.entry & 1 and strides[axis.entry] == 1 and not axis.shrinks) else None
        for k, axis in enumerate(axes)
    )
    after: dict[int, int | None] = {axis.target: factor for axis, factor in zip(axes, kept, strict=True)}
    last = max((target for target, factor in after.items() if factor is not None), default=-1)
    return of_one_operand(op, kept, tuple(after.get(target) for target in range(last + 1)))
