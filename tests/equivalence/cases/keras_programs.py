"""The matrix in two front ends: a custom step (`ad.function`) and Keras's `fit`."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import BATCH, Results, Trainer, in_float32, own, register, values_of
from tests.equivalence.cases.models import (
    MODELS,
    OPTIMIZERS,
    Batches,
    make_batches,
    make_loss,
    make_model,
    make_optimizer,
)
from tests.equivalence.cases.permutations import PERMUTATIONS


def train_function(
    ad: Trainer, model: str, optimizer: str, clip_norm: float | None = None, permutation: int | None = None
) -> Results:
    """Every worker feeds its own part of each batch."""
    batches = _batches(model, permutation)
    with ad.scope():
        net, opt, loss_of = make_model(model), make_optimizer(optimizer), make_loss()

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, net(x, training=True))
            gradients = tape.gradient(loss, net.trainable_variables)
            if clip_norm is not None:
                gradients, _ = tf.clip_by_global_norm(gradients, clip_norm)
            opt.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            return loss

        losses = [float(step(own(ad, x), own(ad, y))) for x, y in zip(batches.x, batches.y, strict=True)]
    return values_of([*net.variables, *opt.variables]) | {"loss": np.array(losses)}


def train_fit(
    ad: Trainer, model: str, optimizer: str, clip_norm: float | None = None, permutation: int | None = None
) -> Results:
    """Trains with `fit` on every worker, with the whole data."""
    x, y = _batches(model, permutation).examples
    with ad.scope():
        net = make_model(model)
        net.compile(make_optimizer(optimizer, clip_norm), make_loss())
        history = net.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return values_of([*net.variables, *net.optimizer.variables]) | {"history loss": np.array(history.history["loss"])}


def _batches(model: str, permutation: int | None) -> Batches:
    batches = make_batches(model)
    return batches if permutation is None else batches.permuted(permutation)


for _front, _train in (("function", train_function), ("keras", train_fit)):
    for _model in MODELS:
        for _optimizer in OPTIMIZERS:
            _name = f"{_front}-{_model}-{_optimizer}"
            _program = functools.partial(_train, model=_model, optimizer=_optimizer)
            register(_name, _program)
            register(f"{_name}-clipped", functools.partial(_program, clip_norm=0.1))
            register(f"{_name}-float32", functools.partial(in_float32, _program))
            for _k in range(PERMUTATIONS):
                _permuted = functools.partial(_program, permutation=_k)
                register(f"{_name}-float32-permuted-{_k}", functools.partial(in_float32, _permuted))
