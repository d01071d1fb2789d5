"""Int8 and Float8: send gradients in 8 bits, in blocks with a scale each."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tensorflow as tf
from pydantic import Field

from autodist.compressors.base import Dense, register_compressor
from autodist.compressors.reduction import Code, Reduction
from autodist.compressors.rounded import SMALLEST, Rounded

BLOCK = 256
"""Elements of a block by default: its scale adds 1.6 % to the bytes."""


@dataclass(frozen=True)
class _EightBits(Rounded):
    """Sends a byte for each element, and a scale for each block, derived from its largest magnitude; see `Rounded`.

    Elements are rounded up or down at random, so that a rounded element has the mean of the element itself: errors of
    many steps cancel out, and error feedback is not needed for that. The draws follow from the gradients' names, the
    worker and the number of the step, so runs repeat them. A worker rounds its pieces and an owner the sum, which is
    sent once: all workers have the same bits. Values of variables are rounded to the nearest code, since their owner
    keeps the exact value and no error adds up.

    Sources: blocks, G. Wang et al., "ZeRO++", arXiv:2306.10209; rounding at random, D. Alistarh et al., "QSGD",
    NeurIPS 2017.

    Attributes:
        block: number of elements with a common scale.
    """

    block: Annotated[int, Field(ge=8, le=1 << 20)] = BLOCK

    top: ClassVar[float]
    """The largest magnitude of a code."""

    def bytes_of(self, gradient: Dense) -> int:
        scale = _scale_dtype(tf.float64 if gradient.element_bytes == tf.float64.size else tf.float32).size
        return gradient.elements + scale * math.ceil(gradient.elements / self.block)

    @abstractmethod
    def rounded(self, values: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Returns the codes of values of at most `top`, rounded up where draws from [0, 1) exceed what is missing."""

    @abstractmethod
    def values_of(self, codes: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the values of codes."""

    def code_of(self, reduction: Reduction) -> Code:
        if not reduction.computes:
            return BlockCode(self, _draws_nothing)
        memory = reduction.memory("steps", tf.zeros([], tf.int64))
        reduction.remember(memory, memory.value + 1)
        first = (reduction.number ^ (reduction.worker << 20)) % (1 << 31)
        return BlockCode(self, lambda k: tf.stack([tf.constant(first + k, tf.int64), memory.value]))

    @property
    def value_code(self) -> Code:
        return BlockCode(self, None)


def _draws_nothing(number: int) -> tf.Tensor:
    raise AssertionError("a worker without replicas owns no piece and encodes nothing")


@dataclass
class BlockCode:
    """Code of the vectors of one reduction.

    Attributes:
        of: the compressor.
        seed_of: returns the seed of the draws for the vector with a number; None: elements are rounded to the nearest
            code.
    """

    of: _EightBits
    seed_of: Callable[[int], tf.Tensor] | None
    _encoded: int = dataclasses.field(default=0, init=False)

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        dtype, length, block = _scale_dtype(vector.dtype), vector.shape[0], self.of.block
        count = math.ceil(length / block)
        blocks = tf.reshape(tf.pad(tf.cast(vector, dtype), [[0, count * block - length]]), [count, block])
        scales = tf.maximum(tf.reduce_max(tf.abs(blocks), 1), SMALLEST) / self.of.top
        draws = self._draw([count, block], dtype)
        # Under a scale that is not finite, as of a loss that overflows, codes of 0 become NaN.
        is_finite = tf.math.is_finite(scales)[:, tf.newaxis]
        values = tf.where(is_finite, blocks / scales[:, tf.newaxis], tf.zeros([], dtype))
        codes = self.of.rounded(values, draws)
        return [tf.reshape(codes, [-1])[:length], scales]

    def _draw(self, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
        """Returns draws from [0, 1) for the next vector."""
        if self.seed_of is None:
            return tf.constant(0.5, dtype)
        seed = self.seed_of(self._encoded)
        self._encoded += 1
        return tf.random.stateless_uniform(shape, seed, dtype=dtype, alg="philox")

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        codes, scales = sent
        values = self.of.values_of(codes, scales.dtype)
        return tf.cast(values * tf.repeat(scales, self.of.block)[: codes.shape[0]], dtype)

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        scales = tf.TensorSpec([math.ceil(length / self.of.block)], _scale_dtype(dtype))
        return [tf.TensorSpec([length], tf.int8), scales]


def _scale_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of scales for gradients of a dtype."""
    return tf.float64 if dtype == tf.float64 else tf.float32


@register_compressor("INT8")
@dataclass(frozen=True)
class Int8(_EightBits):
    """255 equal steps from the most negative to the most positive value of a block."""

    top: ClassVar[float] = 127.0

    def rounded(self, values: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.clip_by_value(tf.floor(values + draws), -self.top, self.top), tf.int8)

    def values_of(self, codes: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(codes, dtype)


@register_compressor("FLOAT8")
@dataclass(frozen=True)
class Float8(_EightBits):
    """The numbers of E4M3, with four bits of precision, for values of very different magnitudes in one block.

    A code is the position of a number among those of its sign. TensorFlow has the type, but cannot send or bitcast it.

    Source: P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433.
    """

    top: ClassVar[float] = 448.0

    def rounded(self, values: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        magnitude = tf.abs(values)
        exponent = tf.floor(tf.math.log(tf.maximum(magnitude, 2.0**_LOWEST)) / math.log(2.0))
        steps = tf.floor(magnitude / tf.pow(tf.constant(2.0, values.dtype), exponent - _BITS) + draws)
        position = tf.minimum((exponent - _LOWEST) * 2**_BITS + steps, len(_NUMBERS) - 1.0)
        return tf.cast(tf.sign(values) * position, tf.int8)

    def values_of(self, codes: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        both = tf.constant([*(-number for number in _NUMBERS[:0:-1]), *_NUMBERS], dtype)
        return tf.gather(both, tf.cast(codes, tf.int32) + (len(_NUMBERS) - 1))


_BITS, _LOWEST = 3, -6
"""Bits of the fraction of E4M3, and the exponent of its smallest normal number."""

_NUMBERS = [
    *(k * 2.0 ** (_LOWEST - _BITS) for k in range(2**_BITS)),
    *((2**_BITS + k) * 2.0 ** (exponent - _BITS) for exponent in range(_LOWEST, 9) for k in range(2**_BITS)),
][:-1]
"""The finite numbers of E4M3 that are not negative, in order; the last code is that of NaN."""
