"""Float16 and BFloat16: send gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors.base import Compressor, Dense, register_compressor
from autodist.compressors.reduction import Reduction, Summed

_TOP = 2.0**15
"""The largest element after scaling for float16, whose largest value is 65504."""

_SMALLEST = 1e-30
"""If the largest element is below this, it becomes less than `_TOP`: its quotient would leave the range of float32."""


@dataclass(frozen=True)
class _SixteenBits(Compressor):
    """Sends 16-bit elements on all hops of an all-reduce: each worker sends 2·(W-1)/W · 2 bytes for an element.

    With error feedback, each rounding error is added to the gradient of the next step by the worker that rounded. A
    worker does so for the pieces that it sends, a rank for the sums of its subgroup, an owner for the sum that it
    broadcasts. Together that is one vector on each worker, as long as the gradients.

    Sources: F. Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; S. P. Karimireddy et al., "Error
    feedback fixes SignSGD", ICML 2019; for both hops, H. Tang et al., "DoubleSqueeze", ICML 2019.

    Attributes:
        error_feedback: True to add the lost part to the next gradient.
    """

    error_feedback: bool = False

    uses_subgroups: ClassVar[bool] = True

    short: ClassVar[tf.DType]
    """The dtype in which gradients are sent."""

    def bytes_of(self, gradient: Dense) -> int:
        return self.short.size * gradient.elements

    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        owners = reduction.owners
        lengths = reduction.cut(len(owners))
        if not reduction.computes:
            specs = [tf.TensorSpec([length], reduction.dtype) for length in lengths]
            made = self._sum_pieces(reduction, dict(zip(owners, specs, strict=True)))
            return reduction.unpack(tf.concat([piece.whole for piece in made], 0))
        flat = reduction.pack()
        memory = reduction.memory("residual", tf.zeros_like(flat)) if self.error_feedback else None
        if memory is not None:
            flat += memory.value
        made = self._sum_pieces(reduction, dict(zip(owners, tf.split(flat, lengths), strict=True)))
        if memory is not None:
            reduction.remember(memory, tf.concat([piece.lost for piece in made], 0))
        return reduction.unpack(tf.concat([piece.whole for piece in made], 0))

    def _sum_pieces(self, reduction: Reduction, pieces: Mapping[int, tf.Tensor | tf.TensorSpec]) -> list[Summed]:
        """Returns the sum of each owner's piece and this worker's encoding error; pieces may be empty."""
        made = reduction.add_by_owners({owner: piece for owner, piece in pieces.items() if piece.shape[0]}, self)
        return [made.get(owner) or _empty(piece.dtype) for owner, piece in pieces.items()]

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        if self.short != tf.float16:
            return [tf.cast(vector, self.short)]
        unit = tf.maximum(tf.reduce_max(tf.abs(vector)), _SMALLEST) / _TOP
        return [tf.cast(vector / unit, tf.float16), unit]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        codes = tf.cast(sent[0], dtype)
        return codes * sent[1] if len(sent) == 2 else codes

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        codes = tf.TensorSpec([length], self.short)
        return [codes, tf.TensorSpec([], dtype)] if self.short == tf.float16 else [codes]


def _empty(dtype: tf.DType) -> Summed:
    """Returns the sum of an empty piece."""
    return Summed(tf.zeros([0], dtype), tf.zeros([0], dtype))


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
