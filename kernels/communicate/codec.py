"""Codec: the encoding of vectors on their way to the workers that sum them, and of the sums on their way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from autodist.compressors import Code
from autodist.kernels.communicate.packed import like_packed, packed, unpacked

Like: TypeAlias = "tf.Tensor | tf.TensorSpec"
Coded: TypeAlias = "list[tf.Tensor]"
"""The encoding of one vector."""


@dataclass(frozen=True)
class Codec:
    """The encoding of the messages of a sum.

    Attributes:
        code: encodes vectors and sums; None: they are sent as they are.
        then: applied to a sum before it is encoded; None: nothing is.
        is_packed: True if small tensors of an encoding are packed into one.
    """

    code: Code | None = None
    then: Callable[[tf.Tensor], tf.Tensor] | None = None
    is_packed: bool = False

    def encode(self, vector: tf.Tensor) -> Coded:
        sent = [vector] if self.code is None else self.code.encode(vector)
        return packed(sent) if self.is_packed else sent

    def decode(self, sent: Sequence[tf.Tensor], like: Like) -> tf.Tensor:
        """Returns the vector, which has the dtype and length of `like`."""
        if self.is_packed:
            sent = unpacked(sent, self._specs(like))
        return sent[0] if self.code is None else self.code.decode(sent, like.dtype)

    def specs(self, vector: Like) -> list[Like]:
        """Returns the specs of the encoding of a vector."""
        return like_packed(self._specs(vector)) if self.is_packed else [*self._specs(vector)]

    def finish(self, total: tf.Tensor) -> tf.Tensor:
        return total if self.then is None else self.then(total)

    def _specs(self, vector: Like) -> list[tf.TensorSpec]:
        length = vector.shape[0]
        return [tf.TensorSpec([length], vector.dtype)] if self.code is None else self.code.specs(length, vector.dtype)


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
