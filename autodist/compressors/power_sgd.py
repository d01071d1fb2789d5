"""PowerSGD: sends a gradient as the product of two thin matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

import tensorflow as tf
from pydantic import Field

from autodist.compressors.base import Compressor, Dense, register_compressor
from autodist.compressors.reduction import Gradient, Memory, Reduction

DEFAULT_RANK = 4
"""Vogels et al. (below) reach the accuracy of plain SGD with 2 to 4."""

LEAST_BYTES = tf.float32.size
"""Smallest element of the matrices, which are float32 if the gradient's dtype is shorter."""


@dataclass(frozen=True)
class _Matrix:
    """A gradient as a matrix.

    Attributes:
        gradient: the gradient.
        value: this worker's share of it plus the residual (n × m).
        residual: the part that was not sent yet.
        right: the right factor of the last step (m × rank), the same on all workers.
    """

    gradient: Gradient
    value: tf.Tensor
    residual: Memory
    right: Memory


@register_compressor("POWER_SGD")
@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low-rank approximation by one step of power iteration, starting from the factors of the last step.

        P = orthogonal basis of Σ M·Q        Q' = Σ Mᵀ·P        the gradient is approximated by P·Q'ᵀ

    M is a worker's share of the gradient plus its residual: M - P·(Mᵀ·P)ᵀ of the step before. One worker, the owner of
    the matrix, computes both sums. It orthogonalizes P and sends it, so that all workers have the same basis. The
    matrices of a bucket are assigned to owners by size and sent to each as one vector. For an n × m gradient the
    workers send 2·(W-1) · rank·(n+m) elements in total, 2·(W-1)/W · rank·(n+m) each on average.

    A gradient of more than two axes is the matrix [all axes but the last, the last]. Vectors, and matrices of at most
    rank·(n+m) elements, are sent uncompressed. 16-bit gradients are computed and sent as float32.

    Source: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD", NeurIPS 2019.

    Attributes:
        rank: columns of P and Q.
        error_feedback: True to add the lost part to the next gradient; required.
    """

    rank: Annotated[int, Field(ge=1, lt=2**31)] = DEFAULT_RANK
    error_feedback: bool = True

    uses_subgroups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_error_feedback(self.error_feedback)

    def bytes_of(self, gradient: Dense) -> int:
        if len(gradient.shape) < 2:
            return gradient.byte_size
        sides = prod(gradient.shape[:-1]) + gradient.shape[-1]
        return self.rank * sides * max(gradient.element_bytes, LEAST_BYTES)

    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        gradients = reduction.gradients
        owners = assign_owners([sum(_sides(gradient)) for gradient in gradients], reduction.owners, reduction.number)
        if reduction.computes:
            left, right = self._factors(reduction, owners)
        else:
            left, right = (
                _sum_by_owner(reduction, what, owners, self._specs(gradients, what), tf.identity)
                for what in ("left", "right")
            )
        return [
            tf.cast(tf.reshape(tf.matmul(p, q, transpose_b=True), gradient.shape), gradient.dtype)
            for gradient, p, q in zip(gradients, left, right, strict=True)
        ]

    def _factors(self, reduction: Reduction, owners: Sequence[int]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns both factors of each matrix, equal on all workers."""
        matrices = [self._matrix(reduction, gradient) for gradient in reduction.gradients]
        sketches = [m.value @ m.right.value for m in matrices]
        left = _sum_by_owner(reduction, "left", owners, sketches, _orthonormal)
        local_right = [tf.matmul(m.value, p, transpose_a=True) for m, p in zip(matrices, left, strict=True)]
        right = _sum_by_owner(reduction, "right", owners, local_right, tf.identity)
        for matrix, p, q, total in zip(matrices, left, local_right, right, strict=True):
            reduction.remember(matrix.residual, matrix.value - tf.matmul(p, q, transpose_b=True))
            # A column of zeros would remain zero: keep the old column if a gradient is zero in one step.
            is_used = tf.reduce_any(tf.not_equal(total, 0), axis=0, keepdims=True)
            reduction.remember(matrix.right, tf.where(is_used, total, matrix.right.value))
        return left, right

    def _specs(self, gradients: Sequence[Gradient], what: str) -> list[tf.TensorSpec]:
        """Returns the specs of one factor of each matrix."""
        return [
            tf.TensorSpec([_sides(gradient)[what == "right"], self.rank], _carrier(gradient)) for gradient in gradients
        ]

    def _matrix(self, reduction: Reduction, gradient: Gradient) -> _Matrix:
        n, m = _sides(gradient)
        share = tf.reshape(reduction.share_of(gradient, _carrier(gradient)), [n, m])
        residual = reduction.memory("residual", tf.zeros([n, m], share.dtype), gradient)
        right = reduction.memory("right", first_right(gradient, self.rank, reduction.number_of(gradient)), gradient)
        return _Matrix(gradient, share + residual.value, residual, right)


def first_right(gradient: Gradient, rank: int, number: int) -> tf.Tensor:
    """Returns the right factor for the first step: random, the same on all workers and in every run.

    Args:
        gradient: the gradient of the factor.
        rank: the number of columns.
        number: 64 bits, the same everywhere and different for each gradient.
    """
    seed = [number >> 36, number >> 8 & 0xFFFFFFF]
    return tf.random.stateless_normal([_sides(gradient)[1], rank], seed, dtype=_carrier(gradient))


def assign_owners(sizes: Sequence[int], workers: Sequence[int], first: int) -> list[int]:
    """Assigns an owner to each item so that the sizes are balanced.

    Args:
        sizes: the sizes of the items.
        workers: the owners to choose from.
        first: any number; breaks ties between workers.
    """
    start = first % len(workers)
    loads = dict.fromkeys((*workers[start:], *workers[:start]), 0)
    owners = [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        owners[k] = min(loads, key=loads.__getitem__)
        loads[owners[k]] += sizes[k]
    return owners


def _sides(gradient: Gradient) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a gradient as a matrix."""
    *rows, columns = gradient.shape.as_list()
    return int(tf.TensorShape(rows).num_elements()), columns


def _carrier(gradient: Gradient) -> tf.DType:
    """Returns the dtype of the computation."""
    return tf.float32 if gradient.dtype.size < tf.float32.size else gradient.dtype


def _orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    return tf.linalg.qr(matrix).q


def _sum_by_owner(
    reduction: Reduction,
    what: str,
    owners: Sequence[int],
    parts: Sequence[tf.Tensor | tf.TensorSpec],
    then: Callable[[tf.Tensor], tf.Tensor],
) -> list[tf.Tensor]:
    """Returns `then` of the sum of each part over the workers, computed by the part's owner and sent to all."""
    places = {owner: [k for k, one in enumerate(owners) if one == owner] for owner in sorted(set(owners))}

    def result_of(summed: tf.Tensor) -> tf.Tensor:
        return _flat([then(one) for one in _split(summed, [parts[k] for k in places[reduction.worker]])])

    vectors = {owner: _flat([parts[k] for k in positions]) for owner, positions in places.items()}
    summed = reduction.add_by_owners(vectors, then=result_of, name=f"{what}_")
    by_place = {
        k: value
        for owner, positions in places.items()
        for k, value in zip(positions, _split(summed[owner].whole, [parts[k] for k in positions]), strict=True)
    }
    return [by_place[k] for k in range(len(parts))]


def _flat(parts: Sequence[tf.Tensor | tf.TensorSpec]) -> tf.Tensor | tf.TensorSpec:
    """Concatenates matrices to one vector; returns its spec if the parts are specs."""
    if isinstance(parts[0], tf.TensorSpec):
        return tf.TensorSpec([sum(_elements(part) for part in parts)], parts[0].dtype)
    return tf.concat([tf.reshape(part, [_elements(part)]) for part in parts], 0)


def _split(vector: tf.Tensor, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
    pieces = tf.split(vector, [_elements(part) for part in like])
    return [tf.reshape(piece, part.shape) for piece, part in zip(pieces, like, strict=True)]


def _elements(part: tf.Tensor | tf.TensorSpec) -> int:
    return int(part.shape.num_elements())
