"""Further options of `fit`: uneven batches, masks, weights, callbacks, optimizers with more state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist.runtime.program import Program
from autodist.tf_compat.patches import replaced
from tests.equivalence.cases.base import Array, Results, Trainer, classes, program, register, values_after_fit
from tests.equivalence.cases.models import make_loss, make_model

layers = keras.layers


def _examples(count: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, 8)).astype(keras.config.floatx()), classes(rng, count)


def _fit(
    ad: Trainer,
    count: int = 80,
    optimizer: Any = None,
    model: Any = None,
    loss: Any = None,
    compiled: dict[str, Any] | None = None,
    one_hot: bool = False,
    **fitted: Any,
) -> Results:
    """Runs two epochs in batches of 20 by default. Models and optimizers are made by functions, in the scope."""
    x, y = _examples(count)
    y = np.eye(3)[y] if one_hot else y
    settings: dict[str, Any] = {"batch_size": 20, "epochs": 2, "shuffle": False, "verbose": 0} | fitted
    with ad.scope():
        net = model() if model else make_model("mlp")
        made = optimizer() if optimizer else keras.optimizers.Adam(0.01)
        net.compile(made, loss or make_loss(), **({"metrics": ["accuracy"]} | (compiled or {})))
        history = net.fit(x, y, **settings)
    return values_after_fit(net, history)


@program
def fit_last_batch_of_one_example(ad: Trainer) -> Results:
    return _fit(ad, count=81)


@program
def fit_synchronized_norms(ad: Trainer) -> Results:
    def make() -> keras.Model:
        dense, norm = layers.Dense(6, use_bias=False), layers.BatchNormalization(synchronized=True)
        last = [layers.Activation("relu"), layers.BatchNormalization(synchronized=True), layers.Dense(3)]
        return keras.Sequential([keras.Input((8,)), dense, norm, *last])

    return _fit(ad, count=83, model=make)


@program
def fit_many_options(ad: Trainer) -> Results:
    """Options that change only the update or the loss: rates by callbacks, averages and decay of weights, frozen
    layers, L2.

    The penalty does not depend on the batch: it must not count once for each replica. The last batch does not divide
    evenly.
    """

    class Faster(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.optimizer.learning_rate = 1.5 * float(self.model.optimizer.learning_rate)

    def make() -> keras.Model:
        frozen = layers.Dense(8, "tanh", trainable=False)
        hidden = layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(0.05))
        return keras.Sequential([keras.Input((8,)), frozen, hidden, layers.Dense(3)])

    def optimizer() -> keras.Optimizer:
        averages: dict[str, Any] = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
        return keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.05, **averages)

    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.05 / (1 + epoch))
    weights = {0: 0.5, 1: 2.0, 2: 1.0}
    given = {"callbacks": [scheduler, Faster()], "class_weight": weights, "epochs": 3}
    return _fit(ad, count=90, model=make, optimizer=optimizer, **given)


@program
def fit_metrics_of_weighted_examples(ad: Trainer) -> Results:
    """Some results are not means over examples and need the joined counts; a part of the data validates."""

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), layers.Dense(3, activation="softmax")])

    metrics = [keras.metrics.Precision(class_id=1), keras.metrics.AUC(num_thresholds=20), keras.metrics.F1Score()]
    compiled = {"metrics": ["accuracy", *metrics], "weighted_metrics": ["accuracy"]}
    given = {"sample_weight": np.random.default_rng(4).uniform(0, 2, 93), "validation_split": 0.2}
    return _fit(ad, count=93, model=make, loss="categorical_crossentropy", one_hot=True, compiled=compiled, **given)


@program
def fit_masked_kernel(ad: Trainer) -> Results:
    """The kernel is masked at its use, as in keras-io's PixelCNN.

    Each worker has made another number of layers before, and Keras's counter of names continues from there.
    """

    class Masked(layers.Dense):
        def call(self, inputs: Any) -> Any:
            self.kernel.assign(self.kernel * np.triu(np.ones(self.kernel.shape)))
            return super().call(inputs)

    def make() -> keras.Model:
        for _ in range(ad.worker_index):
            layers.Dense(1)
        return keras.Sequential([keras.Input((8,)), Masked(6, "tanh"), layers.Dense(3)])

    found = _fit(ad, count=83, model=make)
    return {name if name.startswith("history") else name.split()[0]: value for name, value in found.items()}


@program
def fit_metrics_and_validation(ad: Trainer) -> Results:
    entropy = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")
    compiled = {"metrics": ["accuracy", entropy], "weighted_metrics": ["accuracy"]}
    return _fit(ad, count=93, compiled=compiled, validation_split=0.2)


@program
def fit_masked_lstm(ad: Trainer) -> Results:
    """The loss and its weights depend on how many of a replica's words are none."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 7, 61)
    x = np.where(np.arange(6) < lengths[:, None], rng.integers(1, 20, (61, 6)), 0).astype("int32")
    y = classes(rng, (61, 6))
    with ad.scope():
        net = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.LSTM(5, return_sequences=True),
                layers.Dense(3),
            ]
        )
        net.compile(keras.optimizers.SGD(0.1, momentum=0.9), make_loss(), metrics=["accuracy"])
        history = net.fit(x, y, validation_data=(x[7:], y[7:]), batch_size=20, epochs=2, shuffle=False, verbose=0)
    return values_after_fit(net, history)


@program
def fit_outputs_reduced_in_two_ways(ad: Trainer) -> Results:
    """A sum and a mean by weights of examples, and penalties on activities and weights, scaled by a loss scale."""
    x, y = _examples(90)
    weights = np.random.default_rng(4).uniform(0, 2, 90)
    losses = {
        "whole": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
        "mean": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
    }
    with ad.scope():
        entrance = keras.Input((8,))
        hidden = layers.Dense(
            6, "tanh", activity_regularizer=keras.regularizers.L2(0.05), kernel_regularizer=keras.regularizers.L2(0.02)
        )(entrance)
        exits = {name: layers.Dense(3, name=name)(hidden) for name in losses}
        net = keras.Model(entrance, exits)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=64.0)
        net.compile(optimizer, losses, loss_weights={"whole": 0.1, "mean": 1.0})
        history = net.fit(
            x, dict.fromkeys(losses, y), sample_weight={"whole": np.ones(90), "mean": weights},
            batch_size=20, epochs=2, shuffle=False, verbose=0,
        )  # fmt: skip
    return values_after_fit(net, history)


@program
def fit_loss_scale(ad: Trainer) -> Results:
    def make() -> keras.Optimizer:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), dynamic_growth_steps=3)

    return _fit(ad, count=90, optimizer=make)


@program
def fit_gradient_accumulation(ad: Trainer) -> Results:
    return _fit(ad, count=90, optimizer=lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))


@program
def fit_ema(ad: Trainer) -> Results:
    def make() -> keras.Optimizer:
        return keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)

    return _fit(ad, count=90, optimizer=make)


@program
def fit_several_steps_a_call(ad: Trainer) -> Results:
    """Calls of three steps each; before some of them only the chief's script writes a variable.

    The last two batches, of four and of three examples, are of equal size for all replicas but one: such a call makes
    one step on every worker.
    """
    several: list[int] = []
    repeat = Program.repeat

    def noted(step: Program, batches: Sequence[Any], *args: Any) -> Any:
        several.append(len(batches))
        return repeat(step, batches, *args)

    class Halving(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch in (3, 9) and ad.is_chief:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel / 2)

    with replaced(Program, "repeat", noted):
        found = _fit(ad, 43, batch_size=4, epochs=3, compiled={"steps_per_execution": 3}, callbacks=[Halving()])
    # Three an epoch, but for the first, which traces; who has begun one when the chief has written makes it twice.
    assert not several or (set(several) == {3} and 8 <= len(several) <= 11)
    assert len(several) > 0 or ad.num_workers == 1
    return found


@program
def fit_dataset(ad: Trainer) -> Results:
    """Each worker maps its own examples, in the order of one device, which validation changes as it does there."""
    shuffled = tf.data.Dataset.from_tensor_slices(_examples(90)).shuffle(30, seed=2)
    dataset = shuffled.map(lambda x, y: (x / 2, y)).batch(20)
    with ad.scope():
        net = make_model("mlp")
        net.compile("adagrad", make_loss(), metrics=["accuracy"])
        history = net.fit(dataset, epochs=2, verbose=0, validation_data=dataset.take(2))
    return values_after_fit(net, history)


@program
def fit_own_parts(ad: Trainer) -> Results:
    """Of the last batch, of two examples, two of four replicas have none."""
    x, y = _examples(42)

    class Parts(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Array, Array]:
            rows = ad.batch_slice(20 * index, min(20 * index + 20, len(x)))
            return x[rows], y[rows]

    with ad.scope():
        net = make_model("mlp")
        net.compile(keras.optimizers.Adam(0.01), make_loss(), metrics=["accuracy"])
        history = net.fit(Parts(), epochs=2, verbose=0, shuffle=False)
    return values_after_fit(net, history)


@program
def fit_dropout(ad: Trainer) -> Results:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, seed=3), layers.Dense(3)])

    return _fit(ad, model=make)


class Attendance(layers.Layer):
    """Notes in which step each example was seen: inputs begin with the example's number, from 0."""

    def __init__(self, examples: int) -> None:
        super().__init__()
        self._examples = examples

    def build(self, _: Any) -> None:
        zeros: dict[str, Any] = {"initializer": "zeros", "trainable": False}
        self.seen = self.add_weight(shape=(self._examples,), name="seen", aggregation="sum", **zeros)
        self.steps = self.add_weight(shape=(self._examples,), name="steps", aggregation="sum", **zeros)
        self.clock = self.add_weight(shape=(), name="clock", aggregation="only_first_replica", **zeros)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            here = tf.reduce_sum(tf.one_hot(tf.cast(x[:, 0], tf.int32), self._examples, dtype=x.dtype), axis=0)
            clock = tf.convert_to_tensor(self.clock)
            self.seen.assign_add(here)
            self.steps.assign_add(here * clock)
            self.clock.assign_add(1)
        return x[:, 1:]


def _shuffled(ad: Trainer, as_dataset: bool) -> Results:
    x, y = _examples(50)
    x = np.concatenate([np.arange(50)[:, None], x], axis=1)
    with ad.scope():
        attendance = Attendance(50)
        net = keras.Sequential([keras.Input((9,)), attendance, layers.Dense(3)])
        net.compile(keras.optimizers.SGD(0.05, momentum=0.9), make_loss())
        if as_dataset:
            history = net.fit(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50).batch(8), epochs=1, verbose=0)
        else:
            history = net.fit(x, y, batch_size=8, epochs=1, shuffle=True, verbose=0)
    noted = {"seen": attendance.seen.numpy(), "steps": attendance.steps.numpy()}
    return values_after_fit(net, history) | noted


register("fit_shuffled_arrays", lambda ad: _shuffled(ad, as_dataset=False))
register("fit_shuffled_dataset", lambda ad: _shuffled(ad, as_dataset=True))
