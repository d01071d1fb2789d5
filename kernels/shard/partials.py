"""Partial values: the parts of a sum, or of a largest or smallest value, until a transfer reduces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.control_flow import V1_CONTROL_FLOW
from autodist.graph.ops import Trait, having, linear_operands
from autodist.kernels.shard.propagate import Axes
from autodist.kernels.shard.transfers import State

SMALL_BYTES = 64 << 10
"""A result of at most this many bytes stays partial also if that takes more bytes than to reduce its operands."""

_QUOTIENTS = having(Trait.QUOTIENT | Trait.WHOLE_QUOTIENT)
_MOVES = having(Trait.IDENTITY) | {"ConcatV2", "ExpandDims", "Pack", "Reshape", "Squeeze", "Transpose"}
_MERGES = {"max": ("Any", "LogicalOr", "Max", "Maximum"), "min": ("All", "LogicalAnd", "Min", "Minimum")}
"""Reductions and selections that give the same in any order as the transfers that complete them."""


@dataclass(frozen=True)
class Operand:
    """An operand of a node.

    Attributes:
        state: its state; None: it is whole.
        can_stay: True if it may stay partial: no other node reads it, and its parts are those that the node needs.
        elements: its number of elements.
    """

    state: State | None
    can_stay: bool
    elements: int

    @property
    def partial(self) -> Axes:
        return self.state.partial if self.state is not None and self.can_stay else ()


@dataclass(frozen=True)
class Passed:
    """The partial operands of a node whose result is partial, too.

    Attributes:
        positions: of the operands that stay partial.
        first: for operands that are summed with them, the axes along which they count on the first place alone.
        partial: the axes of the result.
        how: the reduction of the result.
    """

    positions: Sequence[int]
    first: Mapping[int, Axes]
    partial: Axes
    how: str


def passed_on(op: str, operands: Sequence[Operand], elements: int, item_bytes: int, is_integer: bool) -> Passed | None:
    """Returns the partial operands that a node passes on; None if it needs all of its operands reduced.

        AddN(p, q, x)    becomes    all_reduce(AddN(p, q, x on the first place)),  for partial p and q

    Args:
        op: the op of the node.
        operands: by position.
        elements: the number of elements of the result.
        item_bytes: the size of an element of the result.
        is_integer: True if the result is a tensor of integers.
    """
    partial = [k for k, operand in enumerate(operands) if operand.partial]
    linear = linear_operands(op, len(operands))
    hows = {state.how for k in partial if (state := operands[k].state) is not None}
    if not partial or len(hows) != 1 or op in V1_CONTROL_FLOW:  # nothing is reduced inside one
        return None
    [how] = hows
    if how in _MERGES:
        return _extreme(op, operands, how, linear[0] if linear is not None else ())
    if how != "sum" or linear is None or (is_integer and op in _QUOTIENTS) or not {*partial} <= {*linear[0]}:
        return None
    positions, apart = linear
    if apart:
        return Passed(partial, {}, operands[partial[0]].partial, how) if len(partial) == 1 else None
    over = tuple(dict.fromkeys(axis for k in partial for axis in operands[k].partial))
    first = {k: rest for k in positions if (rest := tuple(a for a in over if a not in operands[k].partial))}
    sent = sum(operands[k].elements for k in partial)
    if first and elements >= sent and elements * item_bytes > SMALL_BYTES:
        return None
    return Passed(partial, first, over, how)


def _extreme(op: str, operands: Sequence[Operand], how: str, linear: Sequence[int]) -> Passed | None:
    """Returns the operands that pass on a largest or smallest value; a whole operand is that of each place."""
    positions = [*linear] if op in _MOVES else [0, 1] if op in _MERGES[how] else []
    partial = [k for k, operand in enumerate(operands) if operand.partial]
    if not {*partial} <= {*positions}:
        return None
    return Passed(partial, {}, tuple(dict.fromkeys(axis for k in partial for axis in operands[k].partial)), how)
