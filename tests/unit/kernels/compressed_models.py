"""NumPy references of the compressors, and a step whose gradient is set by a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from autodist.batch.examples import share_of, take
from autodist.kernels.communicate.buckets import ALIGNMENT

Array = NDArray[np.floating]
Model = Callable[[list[Array]], Array]
"""Returns the sum received by all workers, for each worker's share of a gradient; holds all workers' residuals."""


def given_gradient(variable: tf.Variable) -> Callable[..., object]:
    """A step that subtracts the mean of its examples from a variable: they are the gradient."""

    def step(examples: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            each = tf.reduce_sum(variable * examples, list(range(1, len(examples.shape))))
            loss = tf.reduce_mean(each)
        variable.assign_sub(tape.gradient(loss, variable))

    return step


def expected(model: Model, initial: Array, batches: Sequence[Array], workers: int) -> Array:
    """The variable of `given_gradient` after a step a batch."""
    value = initial.copy()
    for batch in batches:
        parts = [take(batch, 0, share_of(len(batch), list(range(workers)), w)) for w in range(workers)]
        sizes = [share_of(len(batch), list(range(workers)), w).size for w in range(workers)]
        shares = [p.sum(0) / len(batch) * (n > 0) for p, n in zip(parts, sizes, strict=True)]
        value -= model(shares)
    return value


def rounding(dtype: tf.DType, error_feedback: bool, workers: int) -> Model:
    """For vectors whose length is a multiple of the alignment: each piece is reduced by its owner."""
    residuals: list[Array] = []

    def add_up(shares: list[Array]) -> Array:
        residuals[:] = residuals or [np.zeros_like(s) for s in shares]
        owed = [s + r * error_feedback for s, r in zip(shares, residuals, strict=True)]
        total = np.zeros_like(shares[0])
        for owner, place in enumerate(pieces(total, workers)):
            sent = [o[place] if w == owner else to_short(o[place], dtype) for w, o in enumerate(owed)]
            total[place] = to_short(sum(sent), dtype)
            for w, o in enumerate(owed):
                residuals[w][place] = sum(sent) - total[place] if w == owner else o[place] - sent[w]
        return total

    return add_up


def to_short(piece: Array, dtype: tf.DType) -> Array:
    """A piece after its way in 16 bits."""
    unit = max(np.abs(piece).max(initial=0), 1e-30) / 2**15 if dtype == tf.float16 else 1.0
    return (piece / unit).astype(dtype.as_numpy_dtype).astype(piece.dtype) * unit


def pieces(vector: Array, workers: int) -> list[slice]:
    """The piece of a vector that each worker owns."""
    step = ALIGNMENT // vector.itemsize
    ends = np.cumsum([step * len(k) for k in np.array_split(np.arange(len(vector) // step), workers)])
    return [slice(int(b), int(e)) for b, e in zip([0, *ends[:-1]], ends, strict=True)]


def largest_elements(fraction: float) -> Model:
    residuals: list[Array] = []

    def add_up(shares: list[Array]) -> Array:
        residuals[:] = residuals or [np.zeros_like(s) for s in shares]
        total = np.zeros_like(shares[0])
        for w, share in enumerate(shares):
            owed = share + residuals[w]
            places = np.argsort(-np.abs(owed), axis=None)[: math.ceil(fraction * owed.size)]
            sent = np.zeros_like(owed)
            sent.flat[places] = owed.flat[places]
            residuals[w] = owed - sent
            total += sent
        return total

    return add_up


def power_iteration(right: Array) -> Model:
    """Applied to the sum of all shares: the approximation is linear in the shares, up to the choice of a basis."""
    residual = np.zeros(())
    columns = right.shape[1]

    def add_up(shares: list[Array]) -> Array:
        nonlocal residual, right
        owed = np.sum(shares, 0) + residual
        left, _ = np.linalg.qr(owed.reshape(-1, owed.shape[-1]) @ right)
        assert left.shape[1] == columns
        found = owed.reshape(-1, owed.shape[-1]).T @ left
        whole = (left @ found.T).reshape(owed.shape)
        residual = owed - whole
        right = np.where(found.any(0), found, right)
        return whole

    return add_up
