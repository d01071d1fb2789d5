"""Joins: what a worker's replicas make is put together; what is to be joined over the workers is noted."""

from autodist.kernels.joins.gradients import GradientJoins
from autodist.kernels.joins.joiner import EVEN_PARTS, SOME_EXAMPLES, Joiner
from autodist.kernels.joins.outputs import OutputJoins
from autodist.kernels.joins.state import StateJoins
from autodist.kernels.joins.statistics import Statistics
from autodist.kernels.joins.whole_state import WholeState
from autodist.kernels.joins.whole_sums import WholeSums

__all__ = [
    "EVEN_PARTS",
    "SOME_EXAMPLES",
    "GradientJoins",
    "Joiner",
    "OutputJoins",
    "StateJoins",
    "Statistics",
    "WholeState",
    "WholeSums",
]
