"""Compressors: what travels in place of a dense gradient, one a file; `chosen.py` tells which a strategy asks for."""

from autodist.kernels.communicate.compressors.base import BucketReduction, Compression
from autodist.kernels.communicate.compressors.chosen import compressor_of, require_no_compressor
from autodist.kernels.communicate.compressors.power_sgd import PowerSGD
from autodist.kernels.communicate.compressors.sixteen_bits import SixteenBits
from autodist.kernels.communicate.compressors.top_k import TopK

__all__ = [
    "BucketReduction",
    "Compression",
    "PowerSGD",
    "SixteenBits",
    "TopK",
    "compressor_of",
    "require_no_compressor",
]
