"""Arguments of a step, and batches of `fit`, with different numbers of rows: each is split by its own first axis."""

from __future__ import annotations

import contextlib
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist
from autodist.errors import CaptureError, UnevenBatchError
from autodist.resources import ResourceSpec


def two_replicas() -> AutoDist:
    return replicas(2)


def replicas(number: int) -> AutoDist:
    nodes = [{"address": "localhost", "cpus": list(range(number))}]
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes}))


def arrays(unlabelled, labelled):
    rng = np.random.default_rng(unlabelled)
    return rng.normal(size=(unlabelled, 3)), rng.normal(size=(labelled, 3)), rng.normal(size=(labelled, 1))


def step_on(w):
    def step(x, z, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2) + tf.reduce_mean((z @ w - y) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return step


@pytest.mark.feature("function", "data: inputs with different numbers of rows")
def test_a_step_trains_as_on_one_device(caplog):
    calls = [arrays(24, 8), arrays(9, 5), arrays(4, 4)]
    alone = tf.Variable(np.ones((3, 1)))
    expected = [float(step_on(alone)(*call)) for call in calls]
    ad = two_replicas()
    with ad.scope(), caplog.at_level(logging.WARNING, "autodist"):
        w = tf.Variable(np.ones((3, 1)))
        step = ad.function(step_on(w))
        found = [float(step(*call)) for call in calls]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(w.numpy(), alone.numpy(), rtol=1e-12)
    assert step.traces == 1  # also if the numbers happen to agree
    told = [r.getMessage() for r in caplog.records if "different numbers of rows" in r.getMessage()]
    assert told == [
        "step: its inputs have different numbers of rows (x has 24, z has 8, y has 8), and each is split by its own. "
        "If every replica should get the whole of one, set its batch_axis to None: for example of a "
        "graph's nodes and edges, if the edges name nodes by their position."
    ]


def test_one_replica_warns_of_nothing(caplog):
    ad = replicas(1)
    with ad.scope(), caplog.at_level(logging.WARNING, "autodist"):
        step = ad.function(step_on(tf.Variable(np.ones((3, 1)))))
        assert np.isfinite(float(step(*arrays(24, 8))))
    assert not [r for r in caplog.records if "different numbers of rows" in r.getMessage()]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            (8, 1),
            r"x has 8, z has 1, y has 1\. Each is split separately, and each of 2 replicas needs .*z has too few",
        ),
        (
            (8, 7, 6),
            r"x has 8, z has 7, y has 6\), and they, or the parts .* do not fit.*7 and 6.*batch_axis.*tf.shape",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(numbers, words):
    x, z, y = (np.ones((n, 3 if k < 2 else 1)) for k, n in enumerate((*numbers, numbers[-1])[:3]))
    ad = two_replicas()
    with ad.scope():
        step = ad.function(step_on(tf.Variable(np.ones((3, 1)))))
        with pytest.raises(UnevenBatchError, match=words):
            step(x, z, y)


class Probed(keras.Model):
    """An encoder that is trained on the one input, and a probe on the other, as in SimCLR."""

    def __init__(self):
        super().__init__()
        start = keras.initializers.GlorotUniform
        self.encoder = keras.layers.Dense(4, activation="tanh", kernel_initializer=start(1), dtype="float64")
        self.probe = keras.layers.Dense(1, kernel_initializer=start(2), dtype="float64")
        self.encoder.build([None, 3])
        self.probe.build([None, 4])
        self.built = True
        self.shown = [keras.metrics.Mean(name=n, dtype="float64") for n in ("near", "probed")]
        self.optimizers = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.1, momentum=0.9)]

    @property
    def metrics(self):
        return self.shown

    def train_step(self, data):
        x, (z, y) = data
        losses = []
        for layer, optimizer, loss_of in zip(
            (self.encoder, self.probe),
            self.optimizers,
            (
                lambda: tf.reduce_mean((self.encoder(x) - 0.5) ** 2),
                lambda: tf.reduce_mean((self.probe(self.encoder(z)) - y) ** 2),
            ),
            strict=True,
        ):
            with tf.GradientTape() as tape:
                loss = loss_of()
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
            losses.append(loss)
        self.shown[0].update_state(losses[0])
        self.shown[1].update_state(losses[1])
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, (z, y) = data
        return {"mean": tf.reduce_mean(self.encoder(x) ** 2), "sum": tf.reduce_sum(self.probe(self.encoder(z)) * y)}

    def predict_step(self, data):
        x, (z, _) = data
        return {"x": self.encoder(x), "z": self.probe(self.encoder(z))}


def fitted():
    x, z, y = arrays(72, 24)
    data = tf.data.Dataset.zip(
        tf.data.Dataset.from_tensor_slices(x).batch(24), tf.data.Dataset.from_tensor_slices((z, y)).batch(9)
    )
    model = Probed()
    model.compile()
    history = model.fit(data, epochs=2, verbose=0, shuffle=False)
    evaluated, predicted = model.evaluate(data, verbose=0, return_dict=True), model.predict(data, verbose=0)
    told = [*history.history.values(), *evaluated.values(), *predicted.values()]
    return [*model.get_weights(), *map(np.array, told)]


@pytest.mark.feature("fit", "data: inputs with different numbers of rows")
@pytest.mark.feature("fit", "step: a `train_step` of one's own")
@pytest.mark.feature("fit", "optimizer: several optimizers")
def test_fit_evaluate_and_predict_are_as_on_one_device(caplog):
    expected = fitted()
    with two_replicas().scope(), caplog.at_level(logging.INFO, "autodist"):
        found = fitted()
    assert not [r.getMessage() for r in caplog.records if "computes the whole" in r.getMessage()]
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10)


def of_a_graph(**scope):
    """A model of examples and of a graph that comes with every batch; the labels lie along their second axis."""

    class Spread(keras.Model):
        def __init__(self):
            super().__init__()
            start = keras.initializers.GlorotUniform(3)
            self.last = keras.layers.Dense(1, kernel_initializer=start, dtype="float64")
            self.last.build([None, 3])
            self.built = True

        def train_step(self, data):
            inputs, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.last(inputs["x"] @ inputs["graph"])[:, 0] - y[0]) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    rng = np.random.default_rng(5)
    batch = ({"x": rng.normal(size=(7, 3)), "graph": rng.normal(size=(3, 3))}, rng.normal(size=(2, 7)))
    with two_replicas().scope(**scope) if scope else contextlib.nullcontext():
        model = Spread()
        model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(tf.data.Dataset.from_tensors(batch).repeat(3), epochs=1, verbose=0, shuffle=False)
    return [*model.get_weights(), *map(np.array, history.history.values())]


@pytest.mark.feature("fit", "data: another batch axis, or none")
def test_fit_takes_batch_axes_by_the_inputs_names():
    found, expected = of_a_graph(batch_axis={"x/graph": None, "y": 1}), of_a_graph()
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12)


def test_batch_axes_of_fit_that_name_no_input_are_refused():
    with pytest.raises(
        CaptureError, match="batch_axis names x/adjacency, and train_step has the arguments x/graph, x/x, y"
    ):
        of_a_graph(batch_axis={"x/adjacency": None})
    with pytest.raises(CaptureError, match="it maps inputs of fit to axes"):
        of_a_graph(batch_axis=3)


def test_parts_of_an_argument_have_axes_of_their_own():
    x, graph = np.random.default_rng(1).normal(size=(4, 6)), np.ones((3, 4))
    ad = two_replicas()
    with ad.scope():
        weight = tf.Variable(tf.ones([4, 1], tf.float64))

        @ad.function(batch_axis={"pair/x": 1, "pair/graph": None})
        def step(pair):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((pair["graph"] @ (weight * pair["x"])) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        loss = float(step({"x": x, "graph": graph}))
    assert loss == pytest.approx(np.mean((graph @ x) ** 2), rel=1e-12)
