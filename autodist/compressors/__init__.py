"""Compressors: what travels in place of a dense gradient that is all-reduced, each with all that belongs to it.

A compressor is one class in one file: its name and options, what it costs, and its arithmetic. Strategies and kernels
know the base class alone and find the others by name, so that a user's own is no other than ours. They stand below
both: what the kernels do for a compressor they hand it as a `Reduction`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autodist.compressors.base import Compressor, Dense, register_compressor, registered_compressors
from autodist.compressors.reduction import Code, Gradient, Memory, Reduction, Summed
from autodist.compressors.uncompressed import NO_COMPRESSOR, Uncompressed
from autodist.tf_compat.importing import import_lazily

if TYPE_CHECKING:
    from autodist.compressors.ours import *  # noqa: F403

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
    """Imports ours when one is asked for: strategies without compressors need no TensorFlow."""
    ours = import_lazily("autodist.compressors.ours")
    if name not in ours.__all__:
        raise AttributeError(f"module 'autodist.compressors' has no attribute {name!r}")
    return getattr(ours, name)
