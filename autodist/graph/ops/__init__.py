"""The op table: all known properties of each op, in one row for all users.

The only exception is the batch degree of ops for which it does not follow from the table: `RULES` in the files of
`autodist.layout`, next to the functions that they refer to.
"""

from autodist.graph.ops.factor_rule import MOST_AXES, Factor, FactorRule, OpView, ReducedBy
from autodist.graph.ops.moves import SlicedAxis, sliced_axes
from autodist.graph.ops.queries import (
    DIFFERENCE,
    FACTORED,
    SUM,
    SUMS,
    UPDATE,
    assigns,
    draws_numbers,
    factor_rule,
    filling,
    having,
    linear_operands,
    sums_in_place,
    writes_rows,
)
from autodist.graph.ops.row import Trait

__all__ = [
    "DIFFERENCE",
    "FACTORED",
    "MOST_AXES",
    "SUM",
    "SUMS",
    "UPDATE",
    "Factor",
    "FactorRule",
    "OpView",
    "ReducedBy",
    "SlicedAxis",
    "Trait",
    "assigns",
    "draws_numbers",
    "factor_rule",
    "filling",
    "having",
    "linear_operands",
    "sliced_axes",
    "sums_in_place",
    "writes_rows",
]
