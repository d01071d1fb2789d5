"""Synchronizers: how one variable, or one shard, is kept and its gradient combined; each kind with all that is its own.

A kind is one class in one file: what the strategy's message says of it, what is refused, what it costs, how it is told,
and who holds the variable. Strategies and kernels read messages through these alone.
"""

from autodist.synchronizers.all_reduce import COLLECTIVES, HIERARCHICAL, AllReduce
from autodist.synchronizers.base import Synchronizer
from autodist.synchronizers.parameter_server import ParameterServer
from autodist.synchronizers.reading import (
    all_synchronizers,
    cut_of,
    field_of,
    has_synchronizer,
    named_synchronizers,
    parts_of,
    set_synchronizer,
    synchronizer_of,
    synchronizers_of,
)
from autodist.synchronizers.subgroups import Subgroups
from autodist.synchronizers.traffic import Piece, Sent

__all__ = [
    "COLLECTIVES",
    "HIERARCHICAL",
    "AllReduce",
    "ParameterServer",
    "Piece",
    "Sent",
    "Subgroups",
    "Synchronizer",
    "all_synchronizers",
    "cut_of",
    "field_of",
    "has_synchronizer",
    "named_synchronizers",
    "parts_of",
    "set_synchronizer",
    "synchronizer_of",
    "synchronizers_of",
]
