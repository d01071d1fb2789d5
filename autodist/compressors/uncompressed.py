"""Uncompressed: sends gradients unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autodist.compressors.base import Compressor, Dense, register_compressor
from autodist.compressors.reduction import Reduction

if TYPE_CHECKING:
    import tensorflow as tf


@register_compressor("NONE")
@dataclass(frozen=True)
class Uncompressed(Compressor):
    """Sends gradients without loss. Set it for single variables to override the compressor of a builder."""

    uses_subgroups: ClassVar[bool] = True

    def bytes_of(self, gradient: Dense) -> int:
        return gradient.byte_size

    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        raise NotImplementedError("Uncompressed sums nothing: the gradients are sent without a compressor")


NO_COMPRESSOR = Uncompressed()
