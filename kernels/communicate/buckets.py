"""Buckets: tensors of one dtype, flattened and sent as one tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.parts import PendingReduction, PendingReductionKind, ReduceOp
from autodist.graph.subgraph import SubgraphBuilder
from autodist.placement.group import Group

BUCKET_BYTES = 4 << 20

ALIGNMENT = 64
"""TensorFlow shares memory between a tensor and its slices if these begin at multiples of 64 bytes."""


@dataclass(frozen=True)
class Bucket:
    """Dense reductions that are executed as one tensor.

    They share group, dtype, weight, kind, update round and reduce op.
    """

    joins: tuple[PendingReduction, ...]

    @property
    def group(self) -> Group:
        return self.joins[0].group

    @property
    def dtype(self) -> tf.DType:
        return self.joins[0].dtype

    @property
    def weight(self) -> str | None:
        return self.joins[0].weight

    @property
    def merge(self) -> ReduceOp:
        """The operation that merges the workers' vectors."""
        return self.joins[0].merge

    @property
    def step(self) -> int:
        """The number of elements that aligned slices are multiples of."""
        return max(1, ALIGNMENT // self.dtype.size)

    @property
    def lengths(self) -> list[int]:
        """The number of elements of each reduction, with the padding that aligns the next one."""
        return [-(-_elements(join) // self.step) * self.step for join in self.joins]

    @property
    def byte_size(self) -> int:
        return sum(self.lengths) * self.dtype.size

    @property
    def key(self) -> str:
        """A key that is the same on all workers and in every program that reduces the same tensors."""
        return key_of(self.joins)

    def pack(self, f: SubgraphBuilder, dtype: tf.DType | None = None, tail: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """Concatenates the local sums into one vector of `sum(lengths)` elements.

        Args:
            f: the builder that adds the nodes.
            dtype: dtype of the vector; the bucket's own by default.
            tail: vectors of that dtype to append.
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
        """Splits a vector made by `pack` into tensors, in the order of the reductions."""
        pieces = tf.split(whole, self.lengths) if len(self.joins) > 1 else [whole]
        found = []
        for join, piece, length in zip(self.joins, pieces, self.lengths, strict=True):
            value = piece[: _elements(join)] if length > _elements(join) else piece
            found.append(tf.reshape(value, join.shape))
        return found

    def cut(self, count: int) -> list[int]:
        """Returns the sizes of `count` aligned pieces of the whole vector."""
        return self.cut_again(sum(self.lengths), count)

    def cut_again(self, length: int, count: int) -> list[int]:
        """Returns the sizes of `count` aligned pieces of a piece of `length` elements."""
        steps = length // self.step
        return [(steps // count + (k < steps % count)) * self.step for k in range(count)]


def _elements(join: PendingReduction) -> int:
    return int(join.shape.num_elements())


def key_of(joins: Iterable[PendingReduction]) -> str:
    """Returns a short name that is the same in all graphs that execute the same reductions."""
    description = ";".join(
        f"{j.kind.value} {j.name} {j.dtype.name} {j.shape} {j.level} {j.index_dtype.name if j.index_dtype else False} "
        f"{j.weight_dtype} {j.merge.value} {j.depth}{f' {j.group.key}' if j.group.key else ''}"
        for j in joins
    )
    return digest(description)


def digest(text: str) -> str:
    """Returns a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_buckets(
    joins: Sequence[PendingReduction], fusion_of: Callable[[PendingReduction], Hashable], limit: int = BUCKET_BYTES
) -> list[Bucket]:
    """Packs dense reductions into buckets, the last first, as the backward pass computes them.

    A bucket is closed when it holds `limit` bytes. Reductions of different groups, fusion groups (`fusion_of`), dtypes,
    weights, kinds, update rounds, communication rounds or reduce ops never share one. Neither do reductions of losses,
    since one may depend on the gradient of another.
    """
    closed: list[list[PendingReduction]] = []
    filling: dict[Hashable, list[PendingReduction]] = {}
    sizes: dict[Hashable, int] = {}
    for join in reversed(joins):
        alone = join.name if join.kind is PendingReductionKind.LOSS else None
        key = (
            join.group, fusion_of(join), join.dtype, join.weight, join.kind, join.level, join.merge, join.depth, alone,
        )  # fmt: skip
        size = _elements(join) * join.dtype.size
        if key in filling and sizes[key] + size > limit:
            closed.append(filling.pop(key))
        filling.setdefault(key, []).append(join)
        sizes[key] = size + (sizes[key] if len(filling[key]) > 1 else 0)
    return [Bucket(tuple(members)) for members in (*closed, *filling.values())]
