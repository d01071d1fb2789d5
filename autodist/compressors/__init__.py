"""Compressors: what travels in place of a dense gradient that is all-reduced, each with all that belongs to it.

A compressor is one class in one file: its name and options, what it costs, and its arithmetic. Strategies and kernels
know the base class alone and find the others by name, so that a user's own is no other than ours. They stand below
both: what the kernels do for a compressor they hand it as a `Reduction`.
"""

import sys

from autodist.quiet import quiet_tensorflow

with quiet_tensorflow(when="tensorflow" not in sys.modules):
    from autodist.compressors.base import Compressor, Dense, register_compressor, registered_compressors
    from autodist.compressors.power_sgd import PowerSGD
    from autodist.compressors.reduction import Gradient, Memory, Reduction
    from autodist.compressors.sixteen_bits import BFloat16, Float16
    from autodist.compressors.top_k import TopK
    from autodist.compressors.uncompressed import NO_COMPRESSOR, Uncompressed

__all__ = [
    "NO_COMPRESSOR",
    "BFloat16",
    "Compressor",
    "Dense",
    "Float16",
    "Gradient",
    "Memory",
    "PowerSGD",
    "Reduction",
    "TopK",
    "Uncompressed",
    "register_compressor",
    "registered_compressors",
]
