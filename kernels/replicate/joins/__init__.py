"""Pending reductions: reduces values over a worker's replicas, and records the reductions left over the workers."""

from autodist.kernels.replicate.joins.global_state import GlobalState
from autodist.kernels.replicate.joins.gradients import GradientJoins
from autodist.kernels.replicate.joins.in_step_all_reduces import InStepAllReduces
from autodist.kernels.replicate.joins.joiner import EVEN_PARTS, SOME_EXAMPLES, Joiner
from autodist.kernels.replicate.joins.outputs import OutputJoins
from autodist.kernels.replicate.joins.state import StateJoins
from autodist.kernels.replicate.joins.statistics import Statistics

__all__ = [
    "EVEN_PARTS",
    "SOME_EXAMPLES",
    "GlobalState",
    "GradientJoins",
    "InStepAllReduces",
    "Joiner",
    "OutputJoins",
    "StateJoins",
    "Statistics",
]
