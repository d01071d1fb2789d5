"""Rounded: base of the compressors that round each element, on all hops of an all-reduce."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors.base import Compressor
from autodist.compressors.reduction import Code, Reduction, Summed

SMALLEST = 1e-30
"""Scales are derived from at least this magnitude: the quotient of a smaller one would leave the range of float32."""


@dataclass(frozen=True)
class Rounded(Compressor):
    """Sends rounded elements on all hops: each worker sends 2·(W-1)/W times the encoded bytes.

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

    @abstractmethod
    def code_of(self, reduction: Reduction) -> Code:
        """Returns the code of the pieces in one reduction, which it may draw random numbers for."""

    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        owners, code = reduction.owners, self.code_of(reduction)
        lengths = reduction.cut(len(owners))
        if not reduction.computes:
            specs = [tf.TensorSpec([length], reduction.dtype) for length in lengths]
            made = _sum_pieces(reduction, code, dict(zip(owners, specs, strict=True)))
            return reduction.unpack(tf.concat([piece.whole for piece in made], 0))
        flat = reduction.pack()
        memory = reduction.memory("residual", tf.zeros_like(flat)) if self.error_feedback else None
        if memory is not None:
            flat += memory.value
        made = _sum_pieces(reduction, code, dict(zip(owners, tf.split(flat, lengths), strict=True)))
        if memory is not None:
            reduction.remember(memory, tf.concat([piece.lost for piece in made], 0))
        return reduction.unpack(tf.concat([piece.whole for piece in made], 0))


def _sum_pieces(reduction: Reduction, code: Code, pieces: Mapping[int, tf.Tensor | tf.TensorSpec]) -> list[Summed]:
    """Returns the sum of each owner's piece and this worker's encoding error; pieces may be empty."""
    made = reduction.add_by_owners({owner: piece for owner, piece in pieces.items() if piece.shape[0]}, code)
    return [made.get(owner) or _empty(piece.dtype) for owner, piece in pieces.items()]


def _empty(dtype: tf.DType) -> Summed:
    """Returns the sum of an empty piece."""
    return Summed(tf.zeros([0], dtype), tf.zeros([0], dtype))
