"""TopK: of each gradient, only the elements of largest magnitude travel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.parts import Join
from autodist.kernels.communicate.compressors.base import BucketReduction, Compression

INDEX = tf.int32
"""The type of an element's place within its gradient."""


@dataclass(frozen=True)
class TopK(Compression):
    """Each worker sends its k largest elements and their places to all: (W-1) · k · (element's bytes + 4) bytes.

    The places differ from worker to worker, so that the sum has up to W·k elements and is not made smaller a second
    time; that pays for few workers or a small fraction. What a worker does not send it adds to its next gradient.

    Source: S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018.

    Attributes:
        fraction: k as a share of a gradient's elements, rounded up.
    """

    fraction: float

    def saves_bytes(self, join: Join) -> bool:
        size = join.dtype.size
        return self.count(join) * (size + INDEX.size) < join.shape.num_elements() * size

    def count(self, join: Join) -> int:
        """How many elements of a gradient travel."""
        return math.ceil(self.fraction * join.shape.num_elements())

    def add_up(self, reduction: BucketReduction) -> list[tf.Tensor]:
        joins = reduction.bucket.joins
        counts = [self.count(join) for join in joins]
        parts = reduction.exchange.all_to_all("largest", self._own(reduction, sum(counts)))
        by_worker = [list(zip(tf.split(v, counts), tf.split(p, counts), strict=True)) for v, p in parts]
        return [_scattered(join, found) for join, *found in zip(joins, *by_worker, strict=True)]

    def _own(self, reduction: BucketReduction, count: int) -> list[tf.Tensor]:
        """What this worker sends; only what it looks like, where it sends nothing."""
        if not reduction.exchange.context.computes:
            return [tf.TensorSpec([count], reduction.bucket.dtype), tf.TensorSpec([count], INDEX)]
        largest = [self._largest(reduction, join) for join in reduction.bucket.joins]
        return [tf.concat([one[at] for one in largest], 0) for at in (0, 1)]

    def _largest(self, reduction: BucketReduction, join: Join) -> tuple[tf.Tensor, tf.Tensor]:
        """Values and places of what travels; the rest is remembered."""
        flat = tf.reshape(reduction.share_of(join), [join.shape.num_elements()])
        memory = reduction.memory("residual", tf.zeros_like(flat), join)
        flat += memory.value
        # What is not a number comes first, or the other workers would never learn of it.
        magnitude = tf.where(tf.math.is_nan(flat), tf.constant(math.inf, flat.dtype), tf.abs(flat))
        places = tf.math.top_k(magnitude, self.count(join), sorted=False, index_type=INDEX).indices
        rest = tf.tensor_scatter_nd_update(flat, places[:, tf.newaxis], tf.zeros([self.count(join)], flat.dtype))
        reduction.remember(memory, rest)
        return tf.gather(flat, places), places


def _scattered(join: Join, found: list[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
    """The sum of what the workers sent of a gradient, with zeros in between."""
    # A segment's values are added one by one in their order, which is that of the workers.
    values, places = (tf.concat([one[at] for one in found], 0) for at in (0, 1))
    return tf.reshape(tf.math.unsorted_segment_sum(values, places, join.shape.num_elements()), join.shape)
