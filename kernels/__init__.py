"""Kernels: graph-to-graph passes that apply a strategy, one per file. `pipeline.py` lists them in order."""

from autodist.kernels.base import AnyKernel, Kernel, run_pipeline
from autodist.kernels.context import Context, Fetching
from autodist.kernels.pipeline import KERNELS, LOCAL_KERNELS, SETTING_KERNELS, find_divided, rewrite
from autodist.kernels.place.assign_owners import find_holders
from autodist.kernels.place.set_by_chief import only_sets
from autodist.kernels.registry import register_kernel, register_rule, registered_kernels
from autodist.kernels.rule import Facts, Refusal, Rewrite, Rule
from autodist.kernels.until_stable import UntilStable

__all__ = [
    "KERNELS",
    "LOCAL_KERNELS",
    "SETTING_KERNELS",
    "AnyKernel",
    "Context",
    "Facts",
    "Fetching",
    "Kernel",
    "Refusal",
    "Rewrite",
    "Rule",
    "UntilStable",
    "find_divided",
    "find_holders",
    "only_sets",
    "register_kernel",
    "register_rule",
    "registered_kernels",
    "rewrite",
    "run_pipeline",
]
