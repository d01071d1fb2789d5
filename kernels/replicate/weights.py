"""The weight of each replica's part of the batch in reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.graph.step import ALL_EXAMPLES, EXAMPLES
from autodist.graph.subgraph import SubgraphBuilder
from autodist.layout import Elements, Examples, Scalar, Total, Weight

Named = Callable[[str, int], str]
"""The name of a captured tensor in the i-th local replica."""


@dataclass(frozen=True)
class ReplicaWeights:
    """The parts of a batch that this worker's replicas have.

    Attributes:
        sizes: per local replica, the tensor with its number of examples (int64 scalar); None if there is no batch.
        named: returns the name of a captured tensor in a local replica.
        spec_of: returns the shape and dtype of a captured tensor.
        is_global: True if every worker knows the total number of examples.
        apart: like `sizes`, for inputs with another number of rows; the key is the first input with that number.
    """

    sizes: Sequence[str] | None
    named: Named
    spec_of: Callable[[str], tf.TensorSpec]
    is_global: bool = False
    apart: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, int | None]:
        """The inputs that are added to the captured ones when the batch is split; empty if there is no batch."""
        if self.sizes is None:
            return {}
        return dict.fromkeys((EXAMPLES, ALL_EXAMPLES)[: 1 + self.is_global])

    def size(self, f: SubgraphBuilder, k: int, dtype: tf.DType) -> tf.Tensor:
        """Returns the number of examples of local replica `k`; 1 if there is no batch."""
        if self.sizes is None:
            return tf.constant(1, dtype)
        return tf.cast(f.input(self.sizes[k], tf.int64, []), dtype)

    def whole(self, f: SubgraphBuilder, weight: Weight, replicas: int, dtype: tf.DType) -> tf.Tensor | None:
        """Returns the sum of a weight over all replicas of all workers; None if only communication can compute it."""
        if not isinstance(weight, Examples):
            return None
        if self.sizes is None:
            return tf.constant(replicas, dtype)
        return tf.cast(f.input(ALL_EXAMPLES, tf.int64, []), dtype) if self.is_global else None

    def is_used(self, f: SubgraphBuilder, k: int) -> tf.Tensor:
        """Returns True if local replica `k` has examples."""
        return self.size(f, k, tf.int64) > 0

    def weight(self, f: SubgraphBuilder, weight: Weight, k: int, dtype: tf.DType) -> tf.Tensor:
        """Returns the weight of local replica `k`, 0 if it has no examples."""
        value = self._value(f, weight, k, dtype)
        if self.sizes is None or isinstance(weight, Examples):
            return value
        return tf.where(self.is_used(f, k), value, tf.zeros([], dtype))

    def tensor(self, f: SubgraphBuilder, name: str, k: int) -> tf.Tensor:
        """Returns the captured tensor `name` of local replica `k`."""
        spec = self.spec_of(name)
        return f.input(self.named(name, k), spec.dtype, spec.shape)

    def _value(self, f: SubgraphBuilder, weight: Weight, k: int, dtype: tf.DType) -> tf.Tensor:
        match weight:
            case Examples():
                return self.size(f, k, dtype)
            case Elements(tensor) if tensor in self.apart:
                return tf.cast(f.input(self.apart[tensor][k], tf.int64, []), dtype)
            case Elements(tensor):
                return tf.cast(tf.size(self.tensor(f, tensor, k), out_type=tf.int64), dtype)
            case Scalar(tensor):
                return tf.reshape(tf.cast(self.tensor(f, tensor, k), dtype), [])
            case Total(tensor, factor):
                value = tf.reshape(tf.cast(self.tensor(f, tensor, k), dtype), [])
                return value * self._value(f, factor, k, dtype)
