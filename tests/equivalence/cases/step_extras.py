"""Custom steps of other structure: two optimizers, functions in functions, shared and scalar variables."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import STEPS, Array, Results, Trainer, classes, own, program, register, values_of
from tests.equivalence.cases.models import make_loss, make_model

layers = keras.layers


def _train(ad: Trainer, step: Any, *batches: Iterable[Array]) -> Array:
    """The losses of a step on each worker's own parts of global batches."""
    return np.array([[float(v) for v in step(*(own(ad, b) for b in batch))] for batch in zip(*batches, strict=True)])


def _data(size: int = 30, seed: int = 5) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(STEPS, size, 8)).astype(keras.config.floatx()), classes(rng, (STEPS, size))


@program
def step_two_optimizers(ad: Trainer) -> Results:
    """A generator learns against the discriminator that the same step has just updated."""
    real, _ = _data()
    noise = np.random.default_rng(6).normal(size=(STEPS, 30, 3))
    with ad.scope():
        generator = keras.Sequential([keras.Input((3,)), layers.Dense(6, activation="tanh"), layers.Dense(8)])
        judge = keras.Sequential([keras.Input((8,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
        generator_optimizer, judge_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)

        @ad.function
        def step(x: tf.Tensor, z: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                fake = generator(z, training=True)
                judged = tf.nn.softplus(-judge(x, training=True)) + tf.nn.softplus(judge(fake, training=True))
                judge_loss = tf.reduce_mean(judged)
            variables = judge.trainable_variables
            judge_optimizer.apply_gradients(zip(tape.gradient(judge_loss, variables), variables, strict=True))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.softplus(-judge(generator(z, training=True), training=True)))
            variables = generator.trainable_variables
            generator_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return judge_loss, loss

        losses = _train(ad, step, real, noise)
    parts = (generator, judge, generator_optimizer, judge_optimizer)
    return values_of([v for part in parts for v in part.variables]) | {"loss": losses}


@program
def step_gradients_added_up(ad: Trainer) -> Results:
    """One step adds up gradients in variables, and another applies them, every second batch."""
    x, y = _data()
    with ad.scope():
        net, optimizer = make_model("mlp"), keras.optimizers.Adam(0.01)
        net.build((None, 8))
        held = [tf.Variable(tf.zeros_like(v.value), trainable=False) for v in net.trainable_variables]
        count = tf.Variable(0.0, dtype=tf.float64, trainable=False)

        @ad.function
        def add(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, net(x, training=True), from_logits=True)
                loss = tf.reduce_sum(losses)
            for total, gradient in zip(held, tape.gradient(loss, net.trainable_variables), strict=True):
                total.assign_add(gradient)
            count.assign_add(tf.cast(tf.shape(y)[0], count.dtype))
            return (loss,)

        @ad.function
        def apply() -> None:
            means = [total / tf.cast(count, total.dtype) for total in held]
            optimizer.apply_gradients(zip(means, net.trainable_variables, strict=True))
            for total in held:
                total.assign(tf.zeros_like(total))
            count.assign(0.0)

        losses = []
        for k in range(STEPS):
            losses += [float(v) for v in add(own(ad, x[k]), own(ad, y[k]))]
            if k % 2:
                apply()
    return values_of([*net.variables, *optimizer.variables]) | {"loss": np.array(losses)}


@program
def step_nested_functions(ad: Trainer) -> Results:
    with ad.scope():
        net, optimizer, loss_of = make_model("mlp"), keras.optimizers.Adam(0.01), make_loss()

        @tf.function
        def loss_at(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return loss_of(y, net(x, training=True))

        @tf.function
        def inner(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_at(x, y)
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            return loss

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor]:
            return (inner(x, y),)

        losses = _train(ad, step, *_data())
    return values_of([*net.variables, *optimizer.variables]) | {"loss": losses}


@program
def step_tied_embedding(ad: Trainer) -> Results:
    """One table is gathered from and multiplied by, so that its gradient is sparse and dense at once."""
    ids = np.random.default_rng(7).integers(0, 9, (STEPS, 30, 4)).astype("int32")
    with ad.scope():
        table = keras.Variable(np.random.default_rng(8).normal(0, 0.3, (12, 5)), name="table", dtype="float64")
        optimizer, loss_of = keras.optimizers.Adagrad(0.1), make_loss()

        @ad.function
        def step(words: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.GradientTape() as tape:
                context = tf.reduce_mean(tf.gather(table.value, words[:, :-1]), axis=1)
                loss = loss_of(words[:, -1], tf.matmul(context, table.value, transpose_b=True))
            optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
            return (loss,)

        losses = _train(ad, step, ids)
    return values_of([table, *optimizer.variables]) | {"loss": losses}


@program
def step_statistics(ad: Trainer) -> Results:
    """A step that returns and keeps statistics other than means: maxima, ranges, any or all over the examples."""
    x, y = _data(27)
    with ad.scope():
        net, optimizer, loss_of = make_model("mlp"), keras.optimizers.SGD(0.1), make_loss()
        most = tf.Variable(0.0, dtype=tf.float64, name="most", trainable=False)
        moving = tf.Variable(np.ones(8), name="moving", trainable=False)
        seen = tf.Variable(False, name="seen", trainable=False)
        large = tf.Variable(0, dtype=tf.int64, name="large", trainable=False)

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.GradientTape() as tape:
                logits = net(x, training=True)
                loss = loss_of(y, logits)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
            )
            most.assign(tf.maximum(most, tf.reduce_max(tf.abs(logits))))
            moving.assign(0.9 * moving + 0.1 * tf.math.reduce_variance(x, 0))
            seen.assign(seen | tf.reduce_any(x > 3))
            tf.cond(tf.reduce_max(x) > 2.5, lambda: large.assign_add(1), lambda: tf.identity(large))
            off = tf.reduce_sum(tf.square(logits[:, 0] - tf.reduce_mean(logits[:, 0])))
            return (
                loss, tf.reduce_max(logits), tf.reduce_min(x), tf.cast(tf.reduce_all(x > -3), tf.float64),
                tf.math.reduce_std(logits), tf.nn.moments(x[:, 0], 0)[1], tf.reduce_logsumexp(logits), tf.norm(x),
                tf.reduce_prod(0.9 + tf.abs(x[:, 1])), 1 - tf.reduce_sum(tf.square(logits[:, 0])) / off,
            )  # fmt: skip

        returned = _train(ad, step, x, y)
    return values_of([*net.variables, most, moving, seen, large]) | {"returned": returned}


@program
def step_large_matrix(ad: Trainer) -> Results:
    """The update of 16 MiB of weights is compiled."""
    x = np.random.default_rng(7).normal(size=(STEPS, 30, 2048))
    with ad.scope():
        matrix = keras.Variable(np.random.default_rng(8).normal(0, 0.05, (2048, 1024)), name="matrix", dtype="float64")
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)

        @ad.function
        def step(batch: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.tanh(batch @ matrix.value) - batch[:, :1024]))
            optimizer.apply_gradients([(tape.gradient(loss, matrix.value), matrix)])
            return (loss,)

        losses = _train(ad, step, x)
    return values_of([matrix, *optimizer.variables]) | {"loss": losses}


@program
def step_scalar_variable(ad: Trainer) -> Results:
    """A scalar, and a variable of TensorFlow's own that is written by hand."""
    x, _ = _data()
    with ad.scope():
        slope, offset = tf.Variable(0.5, dtype=tf.float64), tf.Variable(np.zeros(8), trainable=False, dtype=tf.float64)

        @ad.function
        def step(batch: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([slope, offset])
                loss = tf.reduce_mean(tf.square(tf.sin(batch * slope) - offset - batch))
            by_slope, by_offset = tape.gradient(loss, [slope, offset])
            slope.assign_sub(0.1 * by_slope)
            offset.assign(offset - 0.2 * by_offset)
            return (loss,)

        losses = _train(ad, step, x)
    return {"slope": slope.numpy(), "offset": offset.numpy(), "loss": losses}


def _penalised_step(ad: Trainer, sizes: Sequence[int]) -> Results:
    """Batches of these sizes, in turn; the penalty must not count once for each replica."""
    with ad.scope():
        net, optimizer = make_model("mlp"), keras.optimizers.SGD(0.01, momentum=0.9)

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.GradientTape() as tape:
                logits = net(x, training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
                loss += 0.02 * sum(tf.reduce_sum(tf.square(v.value)) for v in net.trainable_variables)
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
            return (loss,)

        batches = [(x[:size], y[:size]) for x, y, size in zip(*_data(), itertools.cycle(sizes), strict=False)]
        losses = _train(ad, step, *zip(*batches, strict=True))
    return values_of([*net.variables, *optimizer.variables]) | {"loss": losses}


register("step_mean_and_penalty", functools.partial(_penalised_step, sizes=(30,)))
register("step_few_examples", functools.partial(_penalised_step, sizes=(30, 3, 1)))


@program
def step_dropout(ad: Trainer) -> Results:
    """Equal examples; the outputs show the elements that each replica dropped."""
    with ad.scope():
        dropout = layers.Dropout(0.5, seed=11)
        kernel = tf.Variable(np.ones((40, 1)), dtype=tf.float64)

        @ad.function
        def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                dropped = dropout(x, training=True)
                drawn = tf.nn.dropout(x, 0.5)
                loss = tf.reduce_mean(tf.square((dropped + drawn) @ kernel - 1.0))
            kernel.assign_sub(0.001 * tape.gradient(loss, kernel))
            return loss, dropped, drawn

        made = [step(own(ad, np.ones((4, 40)))) for _ in range(3)]
    losses, dropped, drawn = (np.stack([np.asarray(m[k]) for m in made]) for k in range(3))
    shared = values_of([kernel, dropout.seed_generator.state]) | {"loss": losses}
    return shared | {"worker:dropped": dropped, "worker:drawn": drawn}


@program
def step_repeated_ids(ad: Trainer) -> Results:
    """Large enough for many threads to add rows of one id at once."""
    rng = np.random.default_rng(9)
    ids = rng.zipf(1.3, (5, 512, 16)).clip(1, 2000).astype("int32") - 1
    with ad.scope():
        table = keras.Variable(rng.normal(0, 0.1, (2000, 64)), name="table", dtype="float32")
        kernel = keras.Variable(rng.normal(0, 0.1, (64, 64)), name="kernel", dtype="float32")
        optimizer = keras.optimizers.SGD(0.5)

        @ad.function
        def step(words: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.GradientTape() as tape:
                hidden = tf.tanh(tf.reduce_sum(tf.gather(table.value, words), axis=1) @ kernel.value)
                loss = tf.reduce_mean(tf.square(hidden - 0.5))
            variables = [table.value, kernel.value]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), [table, kernel], strict=True))
            return (loss,)

        losses = _train(ad, step, ids)
    return values_of([table, kernel]) | {"loss": losses}


@program
def step_on_records_of_its_own(ad: Trainer) -> Results:
    """Each worker reads only its part: by record numbers, then by a map over a shuffled data set."""
    x, y = (np.concatenate(list(arrays)) for arrays in _data(7))
    with ad.scope():
        net, optimizer, loss_of = make_model("mlp"), keras.optimizers.Adam(0.01), make_loss()

        @ad.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, net(x, training=True))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
            )
            return loss

        losses = [step(x[numbers], y[numbers]) for numbers in ad.sampler(len(x), 17, seed=3)]
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20, seed=1).map(lambda x, y: (x * x, y)).batch(17)
        losses += [step(*batch) for _ in range(2) for batch in ad.distribute_dataset(data)]
    return values_of([*net.variables, *optimizer.variables]) | {"loss": np.array([float(loss) for loss in losses])}
