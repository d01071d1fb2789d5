"""How replicas' values of a tensor join to what one device computes on the whole batch.

`propagate` reads a graph without running it. A table says for each op how the batch shows in its outputs; an op
that is not in the table is unknown, and unknown is never guessed at.
"""

from autodist.graph.propagation.analysis import GraphPropagation, Propagation, propagate
from autodist.graph.propagation.bodies import DrawAt, RowsOfDraw
from autodist.graph.propagation.kinds import (
    ByPosition,
    Elements,
    Examples,
    Joined,
    Kind,
    Mean,
    PerExample,
    Reduced,
    ReducedBy,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
    Weight,
)

__all__ = [
    "ByPosition",
    "DrawAt",
    "Elements",
    "Examples",
    "GraphPropagation",
    "Joined",
    "Kind",
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
