"""SixteenBits: gradients travel as float16 or bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.parts import Join
from autodist.kernels.communicate.compressors.base import BucketReduction, Compression
from autodist.kernels.communicate.exchange import Exchange
from autodist.kernels.sums import ordered_sum

_TOP = 2.0**15
"""What the largest element becomes in float16, whose largest value is 65504."""

_SMALLEST = 1e-30
"""A largest element below this becomes less than `_TOP`: its quotient would leave the range of float32."""


@dataclass(frozen=True)
class SixteenBits(Compression):
    """Two hops as without it, both in 16 bits: each worker sends 2·(W-1)/W · 2 bytes for an element.

    float16 has 11 bits of precision and a narrow range: each piece is divided by a unit that its largest magnitude
    gives and that travels with it, so that no gradient is too large and few are too small. bfloat16 has the range of
    float32 and 8 bits of precision.

    With error feedback, what rounding took from a step's gradient is added to that of the next, by whoever rounded:
    each worker for the pieces that it sends, a piece's owner for the sum that it hands on. Together that is one vector
    on each worker, as long as the gradients.

    Sources: F. Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; S. P. Karimireddy et al., "Error
    feedback fixes SignSGD", ICML 2019; of both hops, H. Tang et al., "DoubleSqueeze", ICML 2019.

    Attributes:
        dtype: float16 or bfloat16.
        error_feedback: whether what is lost is added later.
    """

    dtype: tf.DType
    error_feedback: bool = False

    def saves_bytes(self, join: Join) -> bool:
        return join.dtype.size > self.dtype.size and join.shape.num_elements() > 0

    def add_up(self, reduction: BucketReduction) -> list[tf.Tensor]:
        bucket, exchange = reduction.bucket, reduction.exchange
        owners = exchange.context.computing
        lengths = bucket.cut(len(owners))
        if not exchange.context.computes:
            learned = [self._learn(exchange, *piece, bucket.dtype) for piece in zip(owners, lengths, strict=True)]
            return bucket.unpack(tf.concat(learned, 0))
        flat = reduction.share(bucket.pack(reduction.f))
        memory = reduction.memory("residual", tf.zeros_like(flat)) if self.error_feedback else None
        if memory is not None:
            flat += memory.value
        pieces = zip(owners, tf.split(flat, lengths), strict=True)
        made = [self._add_up_piece(exchange, owner, piece) for owner, piece in pieces]
        if memory is not None:
            reduction.remember(memory, tf.concat([lost for _, lost in made], 0))
        return bucket.unpack(tf.concat([whole for whole, _ in made], 0))

    def _add_up_piece(self, exchange: Exchange, owner: int, piece: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The sum of a piece, as all workers have it, and what this one took from it."""
        context, length = exchange.context, piece.shape[0]
        if length == 0:
            return piece, piece
        if owner != context.worker:
            sent = self._encode(piece)
            exchange.send(owner, "piece", sent)
            return self._learn(exchange, owner, length, piece.dtype), piece - self._decode(sent, piece.dtype)
        # The owner's own part does not travel and is added as it is.
        whole = ordered_sum(
            [
                piece if source == owner else self._receive(exchange, source, "piece", length, piece.dtype)
                for source in context.computing
            ]
        )
        sent = self._encode(whole)
        for to in range(context.workers):
            if to != owner:
                exchange.send(to, "sum", sent)
        told = self._decode(sent, piece.dtype)
        return told, whole - told

    def _learn(self, exchange: Exchange, owner: int, length: int, dtype: tf.DType) -> tf.Tensor:
        """The sum of a piece, from its owner."""
        return self._receive(exchange, owner, "sum", length, dtype) if length else tf.zeros([0], dtype)

    def _receive(self, exchange: Exchange, source: int, what: str, length: int, dtype: tf.DType) -> tf.Tensor:
        return self._decode(exchange.receive(source, what, self._specs(length, dtype)), dtype)

    def _specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        """What `_encode` makes of a piece."""
        codes = tf.TensorSpec([length], self.dtype)
        return [codes, tf.TensorSpec([], dtype)] if self.dtype == tf.float16 else [codes]

    def _encode(self, piece: tf.Tensor) -> list[tf.Tensor]:
        if self.dtype != tf.float16:
            return [tf.cast(piece, self.dtype)]
        unit = tf.maximum(tf.reduce_max(tf.abs(piece)), _SMALLEST) / _TOP
        return [tf.cast(piece / unit, tf.float16), unit]

    def _decode(self, sent: list[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        codes = tf.cast(sent[0], dtype)
        return codes * sent[1] if len(sent) == 2 else codes
