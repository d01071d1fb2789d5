"""Between steps, the script writes variables without `assign`, and training continues from the written values."""

from __future__ import annotations

import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import (
    STEPS,
    Array,
    Results,
    Trainer,
    classes,
    own,
    program,
    values_after_fit,
    values_of,
)
from tests.equivalence.cases.models import make_loss, make_model


def _data() -> tuple[Array, Array]:
    rng = np.random.default_rng(11)
    return rng.normal(size=(STEPS, 30, 8)), classes(rng, (STEPS, 30))


@program
def step_checkpoint_guide(ad: Trainer) -> Results:
    """TensorFlow's guide to checkpoints: trains and saves, restores partly into trained variables, and trains on."""
    with ad.scope(), tempfile.TemporaryDirectory() as folder:
        net, optimizer, loss_of = make_model("mlp"), keras.optimizers.Adam(0.1), make_loss()
        optimizer.build(net.trainable_variables)
        checkpoint = tf.train.Checkpoint(step=tf.Variable(1), optimizer=optimizer, net=net)
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=3)

        @ad.function
        def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, net(x, training=True))
            variables = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        def train_and_checkpoint() -> list[float]:
            checkpoint.restore(manager.latest_checkpoint)
            losses = []
            for x, y in zip(*_data(), strict=True):
                losses.append(float(train_step(own(ad, x), own(ad, y))))
                checkpoint.step.assign_add(1)
                if int(checkpoint.step) % 4 == 0:
                    manager.save()
            return losses

        losses = train_and_checkpoint() + train_and_checkpoint()
        tf.train.Checkpoint(net=net).restore(manager.checkpoints[0]).expect_partial()
        losses += [float(train_step(own(ad, x), own(ad, y))) for x, y in zip(*_data(), strict=True)]
    return values_of([*net.variables, *optimizer.variables, checkpoint.step]) | {"loss": np.array(losses)}


@program
def step_written_past_assign(ad: Trainer) -> Results:
    """A slice, an operation on the handle, a function of the script's own and a data set write, one after each step."""
    with ad.scope():
        net, optimizer, loss_of = make_model("mlp"), keras.optimizers.Adam(0.01), make_loss()
        kernel, bias, *_, last = (v.value for v in net.trainable_variables)

        @ad.function
        def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, net(x, training=True))
            variables = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        @tf.function
        def halve(is_wanted: tf.Tensor) -> None:
            for variable in net.trainable_variables:
                if is_wanted:
                    variable.assign(0.5 * variable)

        counting = tf.data.Dataset.range(2).map(lambda k: last.assign_add(0.1 * last) * tf.cast(k, last.dtype))
        writes = [
            lambda: kernel[1].assign(kernel[0]),
            lambda: tf.raw_ops.AssignAddVariableOp(resource=bias.handle, value=tf.ones_like(bias)),
            lambda: tf.raw_ops.ResourceScatterUpdate(
                resource=bias.handle, indices=[0], updates=tf.ones([1], bias.dtype)
            ),
            lambda: halve(tf.constant(True)),
            lambda: list(counting),
            lambda: halve(tf.constant(False)),
        ]
        losses, sums = [], []
        for k, (x, y) in enumerate(zip(*_data(), strict=True)):
            losses.append(float(train_step(own(ad, x), own(ad, y))))
            writes[k % len(writes)]()
            sums.append(float(tf.raw_ops.Sum(input=last, axis=[0])))  # TensorFlow reads it, not the variable's method
    return values_of([*net.variables, *optimizer.variables]) | {"loss": np.array(losses), "sums": np.array(sums)}


@program
def fit_restored(ad: Trainer) -> Results:
    """A checkpoint is restored between two `fit`s and by a callback in the middle of one."""
    x, y = _data()

    class Restores(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            if epoch == 1:
                checkpoint.read(path).assert_existing_objects_matched()

    with ad.scope(), tempfile.TemporaryDirectory() as folder:
        model = make_model("mlp")
        model.compile(keras.optimizers.Adam(0.01), make_loss())
        checkpoint = tf.train.Checkpoint(model=model)
        model.fit(x[0], y[0], batch_size=30, epochs=2, shuffle=False, verbose=0)
        path = checkpoint.write(f"{folder}/model")
        model.fit(x[1], y[1], batch_size=30, epochs=3, shuffle=False, verbose=0, callbacks=[Restores()])
        checkpoint.read(path)
        history = model.fit(x[2], y[2], batch_size=15, epochs=2, shuffle=False, verbose=0)
    return values_after_fit(model, history)
