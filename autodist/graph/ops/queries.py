"""Queries of the op table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autodist.graph.ops.factor_rule import FactorRule, OpView, notation
from autodist.graph.ops.row import Trait
from autodist.graph.ops.table import TABLE

_BITS = {name: row.traits.value for name, row in TABLE.items()}  # flag operations are slow: 20 000 queries


@functools.cache
def having(traits: Trait) -> frozenset[str]:
    """Returns the ops that have at least one of these traits."""
    wanted = traits.value
    return frozenset(name for name, bits in _BITS.items() if bits & wanted)


def linear_operands(op: str, count: int) -> tuple[Sequence[int], bool] | None:
    """Returns (operands in which an op is linear, True if in each separately); None: unspecified."""
    rule = TABLE[op].linear if op in TABLE else None
    return None if rule is None else (rule.positions(count), rule.apart)


FACTORED = frozenset(name for name, row in TABLE.items() if row.factors is not None)
"""The ops that have a factor rule."""


def factor_rule(op: OpView) -> FactorRule | None:
    """Returns the factor rule of a node; None if its op has none, or if what is known of the node does not fix it."""
    rule = TABLE[op.node.op].factors if op.node.op in TABLE else None
    if rule is None or callable(rule):
        return None if rule is None else rule(op)
    return notation(op, rule)


def filling(op: str) -> int | None:
    """Returns the number that all elements of the op's output equal; None if they are not constant."""
    return TABLE[op].filling if op in TABLE else None


def writes_rows(op: str) -> bool:
    """Returns True if an op writes rows of a variable, selected by its second input, and keeps the rest."""
    return op.startswith(("ResourceScatter", "ResourceSparseApply"))


def draws_numbers(op: str) -> bool:
    """Returns True if an op generates random numbers, which differ between replicas even for equal inputs."""
    return (
        "Random" in op
        or op.startswith(("StatelessTruncated", "StatelessParameterized", "StatelessShuffle"))
        or (op.endswith("Multinomial") or "SampleDistorted" in op)
    )


@dataclass(frozen=True)
class RowWrite:
    """Ops that write rows of a variable.

    Attributes:
        scatter: the op for rows, by their indices.
        scatter_nd: the op for rows, by their positions along the first axes, one after another in order.
    """

    scatter: str
    scatter_nd: str


@dataclass(frozen=True)
class InPlaceSum(RowWrite):
    """Ops that add something to a variable or subtract it.

    Attributes:
        assign: the op for a complete variable.
        arithmetic: the corresponding op on tensors.
    """

    assign: str
    arithmetic: str


SUM = InPlaceSum("ResourceScatterAdd", "ResourceScatterNdAdd", assign="AssignAddVariableOp", arithmetic="AddV2")
DIFFERENCE = InPlaceSum("ResourceScatterSub", "ResourceScatterNdSub", assign="AssignSubVariableOp", arithmetic="Sub")
SUMS = (SUM, DIFFERENCE)
UPDATE = RowWrite("ResourceScatterUpdate", "ResourceScatterNdUpdate")


def assigns(op: str) -> bool:
    """Returns True if an op assigns its last input to a variable, adds it, or subtracts it."""
    return op in having(Trait.ASSIGNMENT) or sums_in_place(op)


def sums_in_place(op: str) -> bool:
    """Returns True if an op adds its last input to a variable, or subtracts it: zeros then leave the variable as is."""
    return any(op in (one.assign, one.scatter, one.scatter_nd) for one in SUMS)
