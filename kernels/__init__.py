"""Kernels: the graph-to-graph passes that carry out a strategy, one a file; `pipeline.py` has their order."""

from autodist.kernels.base import Context, Kernel, run_pipeline
from autodist.kernels.pipeline import KERNELS, rewrite

__all__ = ["KERNELS", "Context", "Kernel", "rewrite", "run_pipeline"]
