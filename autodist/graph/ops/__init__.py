"""The table of ops: what is known of an op stands here once, in a row of its own, for all who ask.

How the batch goes through an op is the one column that stands elsewhere: `RULES` of the files of `graph.propagation`,
beside the functions that are its entries.
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
