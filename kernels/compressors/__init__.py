"""Compressors: what travels in place of a dense gradient, one a file; `chosen.py` tells which a strategy asks for."""

from autodist.kernels.compressors.base import Compressor, Reduction
from autodist.kernels.compressors.chosen import compressor_of, require_no_compressor
from autodist.kernels.compressors.power_sgd import PowerSGD
from autodist.kernels.compressors.sixteen_bits import SixteenBits
from autodist.kernels.compressors.top_k import TopK

__all__ = [
    "Compressor",
    "PowerSGD",
    "Reduction",
    "SixteenBits",
    "TopK",
    "compressor_of",
    "require_no_compressor",
]
