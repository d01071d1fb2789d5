"""`fit` of Keras 2 (tf_keras), with its optimizers of both kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Array, Results, Trainer, classes, program, values_of


def _keras() -> Any:
    """tf_keras, which works in float64."""
    import tf_keras

    tf_keras.backend.set_floatx("float64")
    return tf_keras


def _dense(units: int, seed: int, **options: Any) -> Any:
    keras = _keras()
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed), **options)


def _examples(count: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(11)
    return rng.normal(size=(count, 8)), classes(rng, count), rng.random(count)


def _values(model: Any, *histories: Any, **more: Any) -> Results:
    optimizer = model.optimizer.variables
    found = values_of(
        [*model.variables, *(optimizer() if callable(optimizer) else optimizer), *model.metrics[0].variables]
    )
    for k, history in enumerate(histories):
        found |= {f"history {k} {name}": np.array(values) for name, values in history.history.items()}
    return found | {name: np.array(value) for name, value in more.items()}


@program
def fit_tf_keras(ad: Trainer) -> Results:
    """A functional model: weights, several steps a call, validation, an early stop; then one batch at a time."""
    keras = _keras()
    x, y, weights = _examples(83)
    ad.worker_index  # noqa: B018 - as a script asks that divides its data
    with ad.scope():
        inputs = keras.Input((8,))
        hidden = _dense(6, 1, activation="tanh", kernel_regularizer="l2")(inputs)
        norm = keras.layers.BatchNormalization(synchronized=True)(_dense(5, 2, use_bias=False)(hidden))
        model = keras.Model(inputs, _dense(3, 3)(norm))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.9), global_clipnorm=1.0),
            loss,
            metrics=["accuracy"],
            weighted_metrics=["sparse_categorical_crossentropy"],
            steps_per_execution=3,
        )
    settings: dict[str, Any] = {"batch_size": 20, "shuffle": False, "verbose": 0}
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=0, min_delta=1.0)  # in the second epoch
    weighted = model.fit(
        x, y, sample_weight=weights, epochs=4, validation_data=(x[:31], y[:31]), callbacks=[stop], **settings
    )
    split = model.fit(x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, validation_split=0.2, **settings)
    model.compile(model.optimizer, loss, metrics=["accuracy"])
    one = [model.train_on_batch(x[:7], y[:7]), model.test_on_batch(x[:9], y[:9])]
    whole = model.evaluate(x, y, batch_size=19, verbose=0)
    outputs = [model.predict(x, batch_size=19, verbose=0), model.predict_on_batch(x[:5])]
    return _values(model, weighted, split, one=one, whole=whole, first=outputs[0], second=outputs[1])


@program
def fit_tf_keras_own_step(ad: Trainer) -> Results:
    """A subclassed model with a table and a step of its own, a legacy optimizer, a data set and a Sequence."""
    keras = _keras()
    ids = np.random.default_rng(12).integers(0, 12, (53, 4))
    _, y, _ = _examples(53)

    class Model(keras.Model):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            uniform = keras.initializers.RandomUniform(seed=4)
            self.table, self.out = keras.layers.Embedding(12, 5, embeddings_initializer=uniform), _dense(3, 5)
            self.seen = keras.metrics.Mean(name="loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.seen]

        def call(self, words: Any) -> Any:
            return self.out(tf.reduce_mean(self.table(words), axis=1))

        def train_step(self, data: Any) -> dict[str, Any]:
            words, labels = data
            with tf.GradientTape() as tape:
                loss = self.compiled_loss(labels, self(words))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            self.seen.update_state(loss, sample_weight=tf.shape(words)[0])
            return {"loss": self.seen.result()}

    class Batches(keras.utils.Sequence):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 5

        def __getitem__(self, k: int) -> tuple[Array, Array]:
            return ids[11 * k : 11 * k + 11], y[11 * k : 11 * k + 11]

    with ad.scope():
        model = Model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.legacy.Adam(0.01), loss)
    data = tf.data.Dataset.from_tensor_slices((ids, y)).shuffle(53, seed=6).batch(8)
    return _values(model, model.fit(data, epochs=2, verbose=0), model.fit(Batches(), shuffle=False, verbose=0))
