"""Synchronizers: placement of one variable or shard and reduction of its gradient.

A kind is one class in one file: its strategy message, its checks, its cost, its description and the owner of the
variable. Strategies and kernels read messages through these classes only. A message `NewKind` in the field `new_kind`
of a strategy belongs to the class `NewKind` of the file `new_kind.py`; no other list names it.
"""

from autodist.synchronizers.all_reduce import COLLECTIVES, HIERARCHICAL, AllReduce
from autodist.synchronizers.base import Synchronizer
from autodist.synchronizers.local_steps import LocalSteps
from autodist.synchronizers.parameter_server import ParameterServer
from autodist.synchronizers.reading import (
    all_synchronizers,
    field_of,
    has_synchronizer,
    layers_of,
    mesh_of,
    named_synchronizers,
    partitioning_of,
    parts_of,
    placement_of,
    row_axes_of,
    set_synchronizer,
    stages_of,
    synchronizer_of,
    synchronizers_of,
    with_owners_in_row,
    workers_of_stages,
)
from autodist.synchronizers.subgroups import Subgroups
from autodist.synchronizers.traffic import Piece, Sent

__all__ = [
    "COLLECTIVES",
    "HIERARCHICAL",
    "AllReduce",
    "LocalSteps",
    "ParameterServer",
    "Piece",
    "Sent",
    "Subgroups",
    "Synchronizer",
    "all_synchronizers",
    "field_of",
    "has_synchronizer",
    "layers_of",
    "mesh_of",
    "named_synchronizers",
    "partitioning_of",
    "parts_of",
    "placement_of",
    "row_axes_of",
    "set_synchronizer",
    "stages_of",
    "synchronizer_of",
    "synchronizers_of",
    "with_owners_in_row",
    "workers_of_stages",
]
