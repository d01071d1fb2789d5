"""Compressors: encodings of a dense gradient for its all-reduce.

A compressor is one class in one file, with its name, options, cost and arithmetic. Strategies and kernels use only the
base class and look up subclasses by name, so a user's compressor is treated like a built-in one. This package imports
neither of them: kernels pass a `Reduction` to the compressor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autodist.compressors.base import Compressor, Dense, register_compressor, registered_compressors
from autodist.compressors.reduction import Code, Gradient, Memory, Reduction, Summed
from autodist.compressors.uncompressed import NO_COMPRESSOR, Uncompressed
from autodist.tf_compat.importing import import_lazily

if TYPE_CHECKING:
    from autodist.compressors.built_in import *  # noqa: F403

__all__ = [
    "NO_COMPRESSOR",
    "Code",
    "Compressor",
    "Dense",
    "Gradient",
    "Memory",
    "Reduction",
    "Summed",
    "Uncompressed",
    "register_compressor",
    "registered_compressors",
]


def __getattr__(name: str) -> Any:
    """Imports the built-in compressors on first use: strategies without compressors need no TensorFlow."""
    ours = import_lazily("autodist.compressors.built_in")
    if name not in ours.__all__:
        raise AttributeError(f"module 'autodist.compressors' has no attribute {name!r}")
    return getattr(ours, name)
