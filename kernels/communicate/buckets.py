"""Buckets: tensors of one type, flattened and sent as one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.parts import PendingReduction, PendingReductionKind, ReduceOp
from autodist.graph.subgraph import SubgraphBuilder

BUCKET_BYTES = 4 << 20

ALIGNMENT = 64
"""TensorFlow shares memory between a tensor and its slices where these begin at multiples of 64 bytes."""


@dataclass(frozen=True)
class Bucket:
    """Dense joins that are reduced as one tensor; they share dtype, weight, kind, stage, and how they are merged."""

    joins: tuple[PendingReduction, ...]

    @property
    def dtype(self) -> tf.DType:
        return self.joins[0].dtype

    @property
    def weight(self) -> str | None:
        return self.joins[0].weight

    @property
    def merge(self) -> ReduceOp:
        """How the workers' vectors are merged into one."""
        return self.joins[0].merge

    @property
    def step(self) -> int:
        """How many elements an aligned slice is a multiple of."""
        return max(1, ALIGNMENT // self.dtype.size)

    @property
    def lengths(self) -> list[int]:
        """Elements of each join, with the padding that aligns the next one."""
        return [-(-_elements(join) // self.step) * self.step for join in self.joins]

    @property
    def byte_size(self) -> int:
        return sum(self.lengths) * self.dtype.size

    @property
    def key(self) -> str:
        """The same on all workers and in every program that reduces the same tensors."""
        return key_of(self.joins)

    def pack(self, f: SubgraphBuilder, dtype: tf.DType | None = None, tail: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """The local sums as one vector of `sum(lengths)` elements.

        Args:
            f: where it is built.
            dtype: of the vector; the bucket's own by default.
            tail: vectors of that dtype to put behind.
        """
        dtype = dtype or self.dtype
        flat: list[tf.Tensor] = []
        vector = tf.constant([-1])
        like = [tf.TensorSpec(join.shape, join.dtype) for join in self.joins]
        local = f.inputs_like([join.local[0] for join in self.joins], like)
        for join, length, given in zip(self.joins, self.lengths, local, strict=True):
            value = tf.raw_ops.Reshape(tensor=given, shape=vector)
            value = tf.cast(value, dtype)
            value.set_shape([_elements(join)])
            flat.append(value)
            if length > _elements(join):
                flat.append(tf.zeros([length - _elements(join)], dtype))
        flat += tail
        return tf.concat(flat, 0) if len(flat) > 1 else flat[0]

    def unpack(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """The tensors that `pack` made a vector of, in the order of the joins."""
        pieces = tf.split(whole, self.lengths) if len(self.joins) > 1 else [whole]
        found = []
        for join, piece, length in zip(self.joins, pieces, self.lengths, strict=True):
            value = piece[: _elements(join)] if length > _elements(join) else piece
            found.append(tf.reshape(value, join.shape))
        return found

    def cut(self, count: int) -> list[int]:
        """Sizes of `count` aligned pieces that together are the whole vector."""
        return self.cut_again(sum(self.lengths), count)

    def cut_again(self, length: int, count: int) -> list[int]:
        """Sizes of `count` aligned pieces that together are a piece of so many elements."""
        steps = length // self.step
        return [(steps // count + (k < steps % count)) * self.step for k in range(count)]


def _elements(join: PendingReduction) -> int:
    return int(join.shape.num_elements())


def key_of(joins: Iterable[PendingReduction]) -> str:
    """A short name that is the same wherever the same joins are reduced."""
    told = ";".join(
        f"{j.kind.value} {j.name} {j.dtype.name} {j.shape} {j.level} {j.index_dtype.name if j.index_dtype else False} "
        f"{j.weight_dtype} {j.merge.value} {j.depth}"
        for j in joins
    )
    return digest(told)


def digest(text: str) -> str:
    """A short name for a long one."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_buckets(
    joins: Sequence[PendingReduction], group_of: Callable[[PendingReduction], Hashable], limit: int = BUCKET_BYTES
) -> list[Bucket]:
    """Packs dense joins, the last first, as the backward pass makes them.

    A bucket is closed when it holds `limit` bytes; joins of different groups, dtypes, weights, kinds, stages, depths or
    ways to merge never share one, nor do those of losses, of which one may be made of another's gradient.
    """
    closed: list[list[PendingReduction]] = []
    filling: dict[Hashable, list[PendingReduction]] = {}
    sizes: dict[Hashable, int] = {}
    for join in reversed(joins):
        alone = join.name if join.kind is PendingReductionKind.LOSS else None
        group = (group_of(join), join.dtype, join.weight, join.kind, join.level, join.merge, join.depth, alone)
        size = _elements(join) * join.dtype.size
        if group in filling and sizes[group] + size > limit:
            closed.append(filling.pop(group))
        filling.setdefault(group, []).append(join)
        sizes[group] = size + (sizes[group] if len(filling[group]) > 1 else 0)
    return [Bucket(tuple(members)) for members in (*closed, *filling.values())]
