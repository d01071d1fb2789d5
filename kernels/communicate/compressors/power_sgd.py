"""PowerSGD: a gradient travels as the product of two thin matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.parts import Join
from autodist.kernels.communicate.buckets import digest, key_of
from autodist.kernels.communicate.compressors.base import BucketReduction, Compression
from autodist.kernels.communicate.compressors.memory import Memory
from autodist.kernels.communicate.exchange import Exchange
from autodist.kernels.sums import ordered_sum


@dataclass(frozen=True)
class _Matrix:
    """A gradient as a matrix.

    Attributes:
        join: the gradient.
        value: this worker's share of it and what it still owes (n × m).
        residual: what it owes.
        right: the right factor of the last step (m × rank), the same on all workers.
    """

    join: Join
    value: tf.Tensor
    residual: Memory
    right: Memory


@dataclass(frozen=True)
class PowerSGD(Compression):
    """The best approximation of low rank that one step of power iteration finds, from the one of the last step.

        P = orthogonal basis of Σ M·Q        Q' = Σ Mᵀ·P        the gradient is taken for P·Q'ᵀ

    M is a worker's share of the gradient, with what it still owes: M - P·(Mᵀ·P)ᵀ of the step before. Both sums are made
    by one worker, the matrix's owner; it makes P orthogonal and sends that, so that no two workers can find different
    bases. The matrices of a bucket are dealt out to owners by size. An n × m gradient makes the workers send
    2·(W-1) · rank·(n+m) elements in all, 2·(W-1)/W · rank·(n+m) each on average.

    A gradient of more than two axes is the matrix [all axes but the last, the last]. Vectors, and matrices with no more
    than rank·(n+m) elements, are left alone. Types of 16 bits are computed, and travel, as float32.

    Source: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD", NeurIPS 2019.

    Attributes:
        rank: columns of P and Q.
    """

    rank: int

    def saves_bytes(self, join: Join) -> bool:
        if join.shape.rank < 2:
            return False
        n, m = _sides(join)
        return self.rank * (n + m) * _carrier(join).size < n * m * join.dtype.size

    def add_up(self, reduction: BucketReduction) -> list[tf.Tensor]:
        exchange, joins = reduction.exchange, reduction.bucket.joins
        owners = deal_out([sum(_sides(join)) for join in joins], exchange.context.computing, int(exchange.key, 16))
        if exchange.context.computes:
            left, right = self._factors(reduction, owners)
        else:
            left, right = (_learn(exchange, what, owners, self._specs(joins, what)) for what in ("left", "right"))
        return [
            tf.cast(tf.reshape(tf.matmul(p, q, transpose_b=True), join.shape), join.dtype)
            for join, p, q in zip(joins, left, right, strict=True)
        ]

    def _factors(self, reduction: BucketReduction, owners: Sequence[int]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Both factors of each matrix, as all workers have them."""
        exchange = reduction.exchange
        matrices = [self._matrix(reduction, join) for join in reduction.bucket.joins]
        sketches = [m.value @ m.right.value for m in matrices]
        left = _add_up_by_owner(exchange, "left", owners, sketches, _orthonormal)
        own_right = [tf.matmul(m.value, p, transpose_a=True) for m, p in zip(matrices, left, strict=True)]
        right = _add_up_by_owner(exchange, "right", owners, own_right, tf.identity)
        for matrix, p, q, whole in zip(matrices, left, own_right, right, strict=True):
            reduction.remember(matrix.residual, matrix.value - tf.matmul(p, q, transpose_b=True))
            # A column of zeros would stay so for ever: a gradient that is zero for once must not end in one.
            is_used = tf.reduce_any(tf.not_equal(whole, 0), axis=0, keepdims=True)
            reduction.remember(matrix.right, tf.where(is_used, whole, matrix.right.value))
        return left, right

    def _specs(self, joins: Sequence[Join], what: str) -> list[tf.TensorSpec]:
        """What one factor of each matrix looks like."""
        return [tf.TensorSpec([_sides(join)[what == "right"], self.rank], _carrier(join)) for join in joins]

    def _matrix(self, reduction: BucketReduction, join: Join) -> _Matrix:
        n, m = _sides(join)
        share = tf.reshape(reduction.share_of(join, _carrier(join)), [n, m])
        residual = reduction.memory("residual", tf.zeros([n, m], share.dtype), join)
        right = reduction.memory("right", first_right(join, self.rank), join)
        return _Matrix(join, share + residual.value, residual, right)


def first_right(join: Join, rank: int) -> tf.Tensor:
    """The right factor that the first step begins with: random, the same on all workers and in every run."""
    told = digest(key_of([join]))
    seed = [int(told[:7], 16), int(told[7:14], 16)]
    return tf.random.stateless_normal([_sides(join)[1], rank], seed, dtype=_carrier(join))


def deal_out(sizes: Sequence[int], workers: Sequence[int], first: int) -> list[int]:
    """An owner for each of several things, so that their sizes are dealt out evenly.

    Args:
        sizes: of the things.
        workers: the owners to choose from.
        first: any number; it tells who is served first among equals.
    """
    start = first % len(workers)
    loads = dict.fromkeys((*workers[start:], *workers[:start]), 0)
    owners = [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        owners[k] = min(loads, key=loads.__getitem__)
        loads[owners[k]] += sizes[k]
    return owners


def _sides(join: Join) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix."""
    *rows, columns = join.shape.as_list()
    return int(tf.TensorShape(rows).num_elements()), columns


def _carrier(join: Join) -> tf.DType:
    """The type in which it is computed."""
    return tf.float32 if join.dtype.size < tf.float32.size else join.dtype


def _orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    return tf.linalg.qr(matrix).q


def _add_up_by_owner(
    exchange: Exchange,
    what: str,
    owners: Sequence[int],
    parts: Sequence[tf.Tensor],
    then: Callable[[tf.Tensor], tf.Tensor],
) -> list[tf.Tensor]:
    """`then` of the sum of each part over the workers, made by the part's owner and sent to all."""
    me = exchange.context.worker
    for owner, places in _by_owner(owners):
        if owner != me:
            exchange.send(owner, what, [parts[k] for k in places])
    made = _learn(exchange, what, owners, parts)
    own = [k for k, owner in enumerate(owners) if owner == me]
    if own:
        received = exchange.parts(what, [parts[k] for k in own])
        whole = [then(ordered_sum(one)) for one in zip(*received, strict=True)]
        for to in range(exchange.context.workers):
            if to != me:
                exchange.send(to, f"{what}_sum", whole)
        for k, value in zip(own, whole, strict=True):
            made[k] = value
    return made


def _learn(exchange: Exchange, what: str, owners: Sequence[int], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What the other owners have made of the parts that are theirs; this worker's own parts as they are."""
    made = list(like)
    for owner, places in _by_owner(owners):
        if owner != exchange.context.worker:
            received = exchange.receive(owner, f"{what}_sum", [like[k] for k in places])
            for k, value in zip(places, received, strict=True):
                made[k] = value
    return made


def _by_owner(owners: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Each owner with the places of what it owns."""
    return [(owner, [k for k, one in enumerate(owners) if one == owner]) for owner in sorted(set(owners))]
