"""Layout propagation: how each replica's value of a tensor relates to the value for the whole batch.

`propagate` analyses a graph without running it. A table of rules maps the layouts of an op's inputs to those of its
outputs. An op that has no rule has an unknown layout; layouts are never guessed.
"""

from autodist.graph.ops import ReducedBy
from autodist.layout.bodies import DrawAt, RowsOfDraw
from autodist.layout.kinds import (
    BatchShaped,
    ByPosition,
    Elements,
    Examples,
    Joined,
    Kind,
    Lengths,
    Mean,
    PerExample,
    Reduced,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
    Weight,
)
from autodist.layout.propagation import GraphPropagation, Propagation, propagate

__all__ = [
    "BatchShaped",
    "ByPosition",
    "DrawAt",
    "Elements",
    "Examples",
    "GraphPropagation",
    "Joined",
    "Kind",
    "Lengths",
    "Mean",
    "PerExample",
    "Propagation",
    "Reduced",
    "ReducedBy",
    "Replicated",
    "RowsOfDraw",
    "Scalar",
    "Sum",
    "Total",
    "Unknown",
    "Weight",
    "propagate",
]
