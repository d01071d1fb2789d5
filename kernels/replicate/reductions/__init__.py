"""Pending reductions: reduces values over a worker's replicas, and records the reductions left over the workers."""

from autodist.kernels.replicate.reductions.global_state import GlobalState
from autodist.kernels.replicate.reductions.gradients import GradientReductions
from autodist.kernels.replicate.reductions.in_step_all_reduces import InStepAllReduces
from autodist.kernels.replicate.reductions.outputs import OutputReductions
from autodist.kernels.replicate.reductions.reducer import EVEN_PARTS, SOME_EXAMPLES, Reducer
from autodist.kernels.replicate.reductions.state import StateReductions
from autodist.kernels.replicate.reductions.statistics import Statistics

__all__ = [
    "EVEN_PARTS",
    "SOME_EXAMPLES",
    "GlobalState",
    "GradientReductions",
    "InStepAllReduces",
    "OutputReductions",
    "Reducer",
    "StateReductions",
    "Statistics",
]
