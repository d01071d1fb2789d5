"""Codec: the encoding of vectors on their way to the workers that sum them, and of the sums on their way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from autodist.compressors import Code

Like: TypeAlias = "tf.Tensor | tf.TensorSpec"
Coded: TypeAlias = "list[tf.Tensor]"
"""The encoding of one vector."""


@dataclass(frozen=True)
class Codec:
    """The encoding of the messages of a sum.

    Attributes:
        code: encodes vectors and sums; None: they are sent as they are.
        then: applied to a sum before it is encoded; None: nothing is.
    """

    code: Code | None = None
    then: Callable[[tf.Tensor], tf.Tensor] | None = None

    def encode(self, vector: tf.Tensor) -> Coded:
        return [vector] if self.code is None else self.code.encode(vector)

    def decode(self, sent: Sequence[tf.Tensor], like: Like) -> tf.Tensor:
        """Returns the vector, which has the dtype and length of `like`."""
        return sent[0] if self.code is None else self.code.decode(sent, like.dtype)

    def specs(self, vector: Like) -> list[Like]:
        """Returns the specs of the encoding of a vector."""
        length = vector.shape[0]
        return (
            [tf.TensorSpec([length], vector.dtype)] if self.code is None else [*self.code.specs(length, vector.dtype)]
        )

    def finish(self, total: tf.Tensor) -> tf.Tensor:
        return total if self.then is None else self.then(total)


def joined(codes: Sequence[Sequence[tf.Tensor]]) -> Coded:
    """Joins the encodings of several vectors; returns as many tensors as the encoding of one has."""
    return [tf.concat([tf.reshape(t, [-1]) for t in alike], 0) for alike in zip(*codes, strict=True)]


def like_joined(specs: Sequence[Sequence[Like]]) -> list[tf.TensorSpec]:
    """Returns the specs of `joined`; empty if there are no vectors."""
    return [tf.TensorSpec([sum(_sizes(alike))], alike[0].dtype) for alike in zip(*specs, strict=True)]


def split(came: Sequence[tf.Tensor], specs: Sequence[Sequence[Like]]) -> list[Coded]:
    """Reverses `joined`; `specs` are those of each encoding."""
    columns = [
        [tf.reshape(piece, s.shape) for piece, s in zip(tf.split(whole, _sizes(alike)), alike, strict=True)]
        for whole, alike in zip(came, zip(*specs, strict=True), strict=True)
    ]
    return [list(code) for code in zip(*columns, strict=True)]


def _sizes(alike: Sequence[Like]) -> list[int]:
    return [int(spec.shape.num_elements()) for spec in alike]
