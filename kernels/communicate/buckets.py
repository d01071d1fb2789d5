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

PACK_BYTES = 256 << 10
"""Tensors for or from the owner of variables are packed up to this size; larger ones are sent alone, since packing
copies them."""

ALIGNMENT = 64
"""TensorFlow shares memory between a tensor and its slices if these begin at multiples of 64 bytes."""


@dataclass(frozen=True)
class Bucket:
    """Dense reductions that are executed as one tensor.

    They share group, dtype, weight and reduce op.
    """

    reductions: tuple[PendingReduction, ...]

    @property
    def group(self) -> Group:
        return self.reductions[0].group

    @property
    def dtype(self) -> tf.DType:
        return self.reductions[0].dtype

    @property
    def weight(self) -> str | None:
        return self.reductions[0].weight

    @property
    def merge(self) -> ReduceOp:
        """The operation that merges the workers' vectors."""
        return self.reductions[0].merge

    @property
    def step(self) -> int:
        """The number of elements between two aligned positions; every slice begins at a multiple of it."""
        return _aligned(self.dtype)

    @property
    def lengths(self) -> list[int]:
        """The number of elements of each reduction, with the padding that aligns the next one."""
        return [-(-_elements(pending) // self.step) * self.step for pending in self.reductions]

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of the vector."""
        return tf.TensorSpec([sum(self.lengths)], self.dtype)

    @property
    def key(self) -> str:
        """A key that is the same on all workers and in every program that reduces the same tensors."""
        return key_of(self.reductions)

    def pack(self, f: SubgraphBuilder, dtype: tf.DType | None = None, tail: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """Concatenates the local sums into one vector of `sum(lengths)` elements.

        Args:
            f: the builder that adds the nodes.
            dtype: dtype of the vector; the bucket's own by default.
            tail: vectors of that dtype to append.
        """
        dtype = dtype or self.dtype
        like = [tf.TensorSpec(pending.shape, pending.dtype) for pending in self.reductions]
        local = f.inputs_like([pending.local[0] for pending in self.reductions], like)
        vectors = f.inputs_like(
            f.flatten_each(local), [tf.TensorSpec([_elements(pending)], pending.dtype) for pending in self.reductions]
        )
        flat: list[tf.Tensor] = []
        for pending, length, vector in zip(self.reductions, self.lengths, vectors, strict=True):
            flat.append(tf.cast(vector, dtype))
            if length > _elements(pending):
                flat.append(tf.zeros([length - _elements(pending)], dtype))
        flat += tail
        return tf.concat(flat, 0) if len(flat) > 1 else flat[0]

    def unpack(self, f: SubgraphBuilder, whole: tf.Tensor) -> list[tf.Tensor]:
        """Splits a vector made by `pack` into tensors, in the order of the reductions."""
        pieces = tf.split(whole, self.lengths) if len(self.reductions) > 1 else [whole]
        values = [
            piece[: _elements(pending)] if length > _elements(pending) else piece
            for pending, piece, length in zip(self.reductions, pieces, self.lengths, strict=True)
        ]
        shapes = [pending.shape for pending in self.reductions]
        return f.inputs_like(f.reshape_each(values, shapes), [tf.TensorSpec(shape, whole.dtype) for shape in shapes])

    def cut(self, count: int) -> list[int]:
        """Returns the sizes of `count` aligned pieces of the whole vector."""
        return cut(sum(self.lengths), self.dtype, count)


def cut(length: int, dtype: tf.DType, count: int) -> list[int]:
    """Returns the sizes of `count` aligned pieces of a vector of `length` elements, which ends aligned."""
    step = _aligned(dtype)
    steps = length // step
    return [(steps // count + (k < steps % count)) * step for k in range(count)]


def _aligned(dtype: tf.DType) -> int:
    return max(1, ALIGNMENT // int(dtype.size))


def _elements(pending: PendingReduction) -> int:
    return int(pending.shape.num_elements())


def key_of(reductions: Iterable[PendingReduction]) -> str:
    """Returns a short name that is the same in all graphs that execute the same reductions."""
    description = ";".join(
        f"{j.kind.value} {j.name} {j.dtype.name} {j.shape} {j.level} {j.index_dtype.name if j.index_dtype else False} "
        f"{j.weight_dtype} {j.merge.value} {j.depth}{f' {j.group.key}' if j.group.key else ''}"
        for j in reductions
    )
    return digest(description)


def digest(text: str) -> str:
    """Returns a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key_of_tensors(names: Iterable[str], specs: Iterable[tf.TensorSpec]) -> str:
    """Returns a hash of tensors' names, dtypes and shapes: steps may have tensors of equal names and other shapes."""
    described = (f"{name} {spec.dtype.name} {spec.shape}" for name, spec in zip(names, specs, strict=True))
    return digest(";".join(described))


def sent_order(reductions: Sequence[PendingReduction]) -> list[PendingReduction]:
    """Returns reductions in the order in which they are sent: as the backward pass computes them, rows at the end."""
    dense = [pending for pending in reversed(reductions) if not pending.is_sparse]
    return [*dense, *(pending for pending in reversed(reductions) if pending.is_sparse)]


def make_buckets(
    reductions: Sequence[PendingReduction], fusion_of: Callable[[PendingReduction], Hashable], limit: int = BUCKET_BYTES
) -> list[Bucket]:
    """Packs dense reductions into buckets, the last first, as the backward pass computes them.

    A bucket is closed when it holds `limit` bytes. Reductions of different groups, fusion groups (`fusion_of`), dtypes,
    weights, kinds, update rounds, communication rounds, outer steps or reduce ops never share one. Neither do
    reductions of losses, since one may depend on the gradient of another.
    """
    closed: list[list[PendingReduction]] = []
    filling: dict[Hashable, list[PendingReduction]] = {}
    sizes: dict[Hashable, int] = {}
    for pending in sent_order(reductions):
        alone = pending.name if pending.kind is PendingReductionKind.LOSS else None
        key = (
            pending.group, fusion_of(pending), pending.dtype, pending.weight, pending.kind, pending.level,
            pending.merge, pending.depth, pending.outer, alone,
        )  # fmt: skip
        size = _elements(pending) * pending.dtype.size
        if key in filling and sizes[key] + size > limit:
            closed.append(filling.pop(key))
        filling.setdefault(key, []).append(pending)
        sizes[key] = size + (sizes[key] if len(filling[key]) > 1 else 0)
    return [Bucket(tuple(members)) for members in (*closed, *filling.values())]
