"""Custom compressors, as defined by a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors import Compressor, Dense, Reduction, register_compressor


@register_compressor("FIXED_POINT")
@dataclass(frozen=True)
class FixedPoint(Compressor):
    """Fixed-point numbers of 16 bits: exact if gradients are multiples of the unit."""

    steps: int = 64
    error_feedback: bool = False

    goes_to_all: ClassVar[bool] = True

    def bytes_of(self, gradient: Dense) -> int:
        return 2 * gradient.elements

    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        if not reduction.computes:
            mine = [tf.TensorSpec([sum(reduction.cut(1))], tf.int16)]
        else:
            flat = reduction.pack()
            memory = reduction.memory("lost", tf.zeros_like(flat)) if self.error_feedback else None
            flat += 0 if memory is None else memory.value
            whole = tf.round(flat * self.steps)
            if memory is not None:
                reduction.remember(memory, flat - whole / self.steps)
            mine = [tf.cast(whole, tf.int16)]
        parts = reduction.all_to_all("whole_numbers", mine)
        summed = reduction.ordered_sum([tf.cast(part, reduction.dtype) for (part,) in parts])
        return reduction.unpack(summed / self.steps)


@dataclass(frozen=True)
class Unregistered(FixedPoint):
    """Found by its module."""

    steps: int = 128
