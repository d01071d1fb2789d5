"""Float16 and BFloat16: send gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors.base import Dense, register_compressor
from autodist.compressors.reduction import Code, Reduction
from autodist.compressors.rounded import SMALLEST, Rounded

_TOP = 2.0**15
"""The largest element after scaling for float16, whose largest value is 65504."""


@dataclass(frozen=True)
class _SixteenBits(Rounded):
    """Sends 16-bit elements: each worker sends 2·(W-1)/W · 2 bytes for an element; see `Rounded`."""

    short: ClassVar[tf.DType]
    """The dtype in which gradients are sent."""

    def bytes_of(self, gradient: Dense) -> int:
        return self.short.size * gradient.elements

    def bytes_of_value(self, value: Dense) -> int:
        unit = value.element_bytes if self.short == tf.float16 else 0
        return self.bytes_of(value) + unit

    def code_of(self, reduction: Reduction) -> Code:
        return self

    @property
    def value_code(self) -> Code:
        return self

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        if self.short != tf.float16:
            return [tf.cast(vector, self.short)]
        unit = tf.maximum(tf.reduce_max(tf.abs(vector)), SMALLEST) / _TOP
        return [tf.cast(vector / unit, tf.float16), unit]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        codes = tf.cast(sent[0], dtype)
        return codes * sent[1] if len(sent) == 2 else codes

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        codes = tf.TensorSpec([length], self.short)
        return [codes, tf.TensorSpec([], dtype)] if self.short == tf.float16 else [codes]


@register_compressor("FLOAT16")
@dataclass(frozen=True)
class Float16(_SixteenBits):
    """11 bits of precision and a narrow range.

    Each piece is divided by a scale derived from its largest magnitude, which is sent with it: no gradient overflows
    and few underflow.
    """

    short: ClassVar[tf.DType] = tf.float16


@register_compressor("BFLOAT16")
@dataclass(frozen=True)
class BFloat16(_SixteenBits):
    """The range of float32 and 8 bits of precision."""

    short: ClassVar[tf.DType] = tf.bfloat16
