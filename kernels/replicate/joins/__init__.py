"""Joins: what a worker's replicas make is put together; what is to be joined over the workers is noted."""

from autodist.kernels.replicate.joins.gradients import GradientJoins
from autodist.kernels.replicate.joins.joiner import EVEN_PARTS, SOME_EXAMPLES, Joiner
from autodist.kernels.replicate.joins.outputs import OutputJoins
from autodist.kernels.replicate.joins.state import StateJoins
from autodist.kernels.replicate.joins.statistics import Statistics
from autodist.kernels.replicate.joins.whole_state import WholeState
from autodist.kernels.replicate.joins.whole_sums import WholeSums

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
