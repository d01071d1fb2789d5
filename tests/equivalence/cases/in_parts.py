"""The reference for a model whose examples interact: one device computes the parts one after the other.

Each part's gradients and moving averages are computed from the same variables. Both are then averaged, weighted by the
examples of each part, and applied once. Nothing here uses AutoDist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Array, Results, Trainer, in_float32, register, values_of
from tests.equivalence.cases.models import OPTIMIZERS, make_batches, make_loss, make_model, make_optimizer
from tests.equivalence.cases.permutations import PERMUTATIONS

SHAPES = ((1, 2), (2, 1), (2, 2))
"""Workers × replicas of each."""

Partitioning = Callable[[Array], list[Array]]


def cut_for_feeds(batch: Array, workers: int, replicas: int) -> list[Array]:
    """Returns the parts of all replicas if each worker splits off its own part and AutoDist splits that again."""
    return [part for mine in np.array_split(batch, workers) for part in np.array_split(mine, replicas)]


def cut_for_fit(batch: Array, workers: int, replicas: int) -> list[Array]:
    """Returns the parts of all replicas if AutoDist splits the global batch."""
    return np.array_split(batch, workers * replicas)


def weighted_mean(values: Sequence[Array], weights: Sequence[int]) -> Array:
    return np.asarray(np.average(np.stack(values), axis=0, weights=weights))


def train_in_parts(
    _: Trainer, optimizer: str, cut: Partitioning, loss_name: str, permutation: int | None = None
) -> Results:
    """Trains; a permutation puts the examples of each part into another order."""
    rng = None if permutation is None else np.random.default_rng(permutation)
    batches = make_batches("convolution")
    net, opt, loss_of = make_model("convolution"), make_optimizer(optimizer), make_loss()
    opt.build(net.trainable_variables)

    @tf.function(reduce_retracing=True)
    def compute(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = loss_of(y, net(x, training=True))
        return loss, tape.gradient(loss, net.trainable_variables)

    losses = []
    for x, y in zip(batches.x, batches.y, strict=True):
        before = [v.numpy() for v in net.non_trainable_variables]
        made: list[list[Array]] = []
        parts = list(zip(cut(x), cut(y), strict=True))
        for part_x, part_y in parts:
            _assign(net.non_trainable_variables, before)
            order = np.arange(len(part_x)) if rng is None else rng.permutation(len(part_x))
            loss, gradients = compute(part_x[order], part_y[order])
            values = [loss, *gradients, *net.non_trainable_variables]
            made.append([np.asarray(v) for v in values])
        counts = [len(part_x) for part_x, _ in parts]
        loss, *rest = (weighted_mean(values, counts) for values in zip(*made, strict=True))
        split = len(net.trainable_variables)
        opt.apply([tf.constant(g) for g in rest[:split]], net.trainable_variables)
        _assign(net.non_trainable_variables, rest[split:])
        losses.append(loss)
    reported = np.array(losses) if loss_name == "loss" else np.array([np.mean(losses)])
    values = values_of([*net.variables, *opt.variables])
    return values | {loss_name: reported}


def _assign(variables: Sequence[tf.Variable], values: Sequence[Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


for _front, _cut, _loss in (("function", cut_for_feeds, "loss"), ("keras", cut_for_fit, "history loss")):
    for _optimizer in OPTIMIZERS:
        for _w, _r in SHAPES:
            _name = f"{_front}-convolution-{_optimizer}-in-{_w}x{_r}"
            _pieces = functools.partial(_cut, workers=_w, replicas=_r)
            _program = functools.partial(train_in_parts, optimizer=_optimizer, cut=_pieces, loss_name=_loss)
            register(_name, _program)
            register(f"{_name}-float32", functools.partial(in_float32, _program))
            for _k in range(PERMUTATIONS):
                _permuted = functools.partial(_program, permutation=_k)
                register(f"{_name}-float32-permuted-{_k}", functools.partial(in_float32, _permuted))
