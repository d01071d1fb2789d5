"""The op table: all known properties of each op, in one row for all users.

The only exception is propagation of the batch through an op: `RULES` in the files of `autodist.layout`, next to the
functions that they refer to.
"""

from autodist.graph.ops.row import Trait
from autodist.graph.ops.table import (
    DIFFERENCE,
    SUM,
    SUMS,
    draws_numbers,
    filling,
    having,
    linear_operands,
    writes_rows,
)

__all__ = ["DIFFERENCE", "SUM", "SUMS", "Trait", "draws_numbers", "filling", "having", "linear_operands", "writes_rows"]
