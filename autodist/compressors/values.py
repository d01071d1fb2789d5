"""ValueCode: the encoding of a variable's value for the cached copies of other workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.compressors.base import Compressor, Dense
from autodist.compressors.reduction import Code


@dataclass(frozen=True)
class ValueCode:
    """Encodes values of one shape and dtype; a value that a compressor would not shrink is sent as it is.

    Attributes:
        code: encodes the value as a vector; None: it is sent as it is.
        spec: shape and dtype of the value.
    """

    code: Code | None
    spec: tf.TensorSpec

    @classmethod
    def of(cls, encoding: str, shape: Sequence[int], dtype: tf.DType) -> ValueCode:
        """Returns the code of values; `encoding` is that of a compressor (`Compressor.encoding`)."""
        spec = tf.TensorSpec(shape, dtype)
        if not encoding:
            return cls(None, spec)
        compressor, value = Compressor.from_encoding(encoding), Dense(tuple(shape), dtype.size)
        is_smaller = compressor.bytes_of_value(value) < value.byte_size
        return cls(compressor.value_code if is_smaller else None, spec)

    def encode(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors to send in place of a value."""
        return [value] if self.code is None else self.code.encode(tf.reshape(value, [self._length]))

    def decode(self, sent: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the value that the result of `encode` stands for, with the same bits on all workers."""
        if self.code is None:
            return sent[0]
        return tf.reshape(self.code.decode(sent, self.spec.dtype), self.spec.shape)

    def rounded(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value as copies have it."""
        return self.decode(self.encode(value))

    def specs(self) -> list[tf.TensorSpec]:
        """Returns the specs of the result of `encode`."""
        return [self.spec] if self.code is None else self.code.specs(self._length, self.spec.dtype)

    @property
    def _length(self) -> int:
        return int(self.spec.shape.num_elements())
