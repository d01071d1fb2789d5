"""Float16 and BFloat16: gradients travel in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors.base import Compressor, Dense, register_compressor
from autodist.compressors.reduction import Reduction

_TOP = 2.0**15
"""What the largest element becomes in float16, whose largest value is 65504."""

_SMALLEST = 1e-30
"""A largest element below this becomes less than `_TOP`: its quotient would leave the range of float32."""


@dataclass(frozen=True)
class _SixteenBits(Compressor):
    """Two hops as without it, both in 16 bits: each worker sends 2·(W-1)/W · 2 bytes for an element.

    With error feedback, what rounding took from a step's gradient is added to that of the next, by whoever rounded:
    each worker for the pieces that it sends, a piece's owner for the sum that it hands on. Together that is one vector
    on each worker, as long as the gradients.

    Sources: F. Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; S. P. Karimireddy et al., "Error
    feedback fixes SignSGD", ICML 2019; of both hops, H. Tang et al., "DoubleSqueeze", ICML 2019.

    Attributes:
        error_feedback: whether what is lost is added later.
    """

    error_feedback: bool = False

    short: ClassVar[tf.DType]
    """In what gradients travel."""

    def bytes_of(self, gradient: Dense) -> int:
        return self.short.size * gradient.elements

    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        owners = reduction.computing
        lengths = reduction.cut(len(owners))
        if not reduction.computes:
            learned = [self._learn(reduction, *piece) for piece in zip(owners, lengths, strict=True)]
            return reduction.unpack(tf.concat(learned, 0))
        flat = reduction.pack()
        memory = reduction.memory("residual", tf.zeros_like(flat)) if self.error_feedback else None
        if memory is not None:
            flat += memory.value
        pieces = zip(owners, tf.split(flat, lengths), strict=True)
        made = [self._add_up_piece(reduction, owner, piece) for owner, piece in pieces]
        if memory is not None:
            reduction.remember(memory, tf.concat([lost for _, lost in made], 0))
        return reduction.unpack(tf.concat([whole for whole, _ in made], 0))

    def _add_up_piece(self, reduction: Reduction, owner: int, piece: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The sum of a piece, as all workers have it, and what this one took from it."""
        length = piece.shape[0]
        if length == 0:
            return piece, piece
        if owner != reduction.worker:
            sent = self._encode(piece)
            reduction.send(owner, "piece", sent)
            return self._learn(reduction, owner, length), piece - self._decode(sent, piece.dtype)
        # The owner's own part does not travel and is added as it is.
        whole = reduction.ordered_sum(
            [
                piece if source == owner else self._receive(reduction, source, "piece", length)
                for source in reduction.computing
            ]
        )
        sent = self._encode(whole)
        for to in range(reduction.workers):
            if to != owner:
                reduction.send(to, "sum", sent)
        told = self._decode(sent, piece.dtype)
        return told, whole - told

    def _learn(self, reduction: Reduction, owner: int, length: int) -> tf.Tensor:
        """The sum of a piece, from its owner."""
        return self._receive(reduction, owner, "sum", length) if length else tf.zeros([0], reduction.dtype)

    def _receive(self, reduction: Reduction, source: int, what: str, length: int) -> tf.Tensor:
        return self._decode(reduction.receive(source, what, self._specs(length, reduction.dtype)), reduction.dtype)

    def _specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        """What `_encode` makes of a piece."""
        codes = tf.TensorSpec([length], self.short)
        return [codes, tf.TensorSpec([], dtype)] if self.short == tf.float16 else [codes]

    def _encode(self, piece: tf.Tensor) -> list[tf.Tensor]:
        if self.short != tf.float16:
            return [tf.cast(piece, self.short)]
        unit = tf.maximum(tf.reduce_max(tf.abs(piece)), _SMALLEST) / _TOP
        return [tf.cast(piece / unit, tf.float16), unit]

    def _decode(self, sent: list[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        codes = tf.cast(sent[0], dtype)
        return codes * sent[1] if len(sent) == 2 else codes


@register_compressor("FLOAT16")
@dataclass(frozen=True)
class Float16(_SixteenBits):
    """11 bits of precision and a narrow range.

    Each piece is divided by a unit that its largest magnitude gives and that travels with it, so that no gradient is
    too large and few are too small.
    """

    short: ClassVar[tf.DType] = tf.float16


@register_compressor("BFLOAT16")
@dataclass(frozen=True)
class BFloat16(_SixteenBits):
    """The range of float32 and 8 bits of precision."""

    short: ClassVar[tf.DType] = tf.bfloat16
