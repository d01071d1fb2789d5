"""The table, and what it is asked."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.ops import arithmetic, layout, network, state
from autodist.graph.ops.row import Row, Trait

ROWS = (*arithmetic.ROWS, *layout.ROWS, *network.ROWS, *state.ROWS)

TABLE: Mapping[str, Row] = {name: row for row in ROWS for name in row.names.split()}
"""By op, the row that it stands in."""

_BITS = {name: row.traits.value for name, row in TABLE.items()}  # flags themselves are slow, and asked 20 000 times


@functools.cache
def having(traits: Trait) -> frozenset[str]:
    """The ops that have one of these traits, or several."""
    wanted = traits.value
    return frozenset(name for name, bits in _BITS.items() if bits & wanted)


def linear_operands(op: str, count: int) -> tuple[Sequence[int], bool] | None:
    """The operands in which an op with `count` of them is linear, and whether in each apart; None: it is not said."""
    rule = TABLE[op].linear if op in TABLE else None
    return None if rule is None else (rule.positions(count), rule.apart)


def filling(op: str) -> int | None:
    """The number that all elements are of what an op makes of a tensor's shape; None: it makes something else."""
    return TABLE[op].filling if op in TABLE else None


def writes_rows(op: str) -> bool:
    """Whether an op writes some rows of a variable, given by its second input, and leaves the rest."""
    return op.startswith(("ResourceScatter", "ResourceSparseApply"))


def draws_numbers(op: str) -> bool:
    """Whether an op makes random numbers, which are other ones on each replica although all inputs are the same."""
    return (
        "Random" in op
        or op.startswith(("StatelessTruncated", "StatelessParameterized", "StatelessShuffle"))
        or (op.endswith("Multinomial") or "SampleDistorted" in op)
    )


@dataclass(frozen=True)
class InPlaceSum:
    """How something is added to a variable, or taken from it.

    Attributes:
        assign: the op for all of it.
        arithmetic: what makes the same of tensors.
        scatter: the op for rows of it, by their numbers.
        scatter_nd: the op for rows, by their places, one after the other in their order.
    """

    assign: str
    arithmetic: str
    scatter: str
    scatter_nd: str


SUM = InPlaceSum("AssignAddVariableOp", "AddV2", "ResourceScatterAdd", "ResourceScatterNdAdd")
DIFFERENCE = InPlaceSum("AssignSubVariableOp", "Sub", "ResourceScatterSub", "ResourceScatterNdSub")
SUMS = (SUM, DIFFERENCE)
