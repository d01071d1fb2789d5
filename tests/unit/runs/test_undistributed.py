"""A script that requests several devices and trains on one gets one warning; others get none."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import CaptureError
from autodist.runs.undistributed import UndistributedScript

X, Y = np.ones((4, 3)), np.ones((4, 2))
TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "autodist")
    return caplog


def records(said: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in said.records if r.name == "autodist"]


def warnings(said: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in records(said) if r.levelno == logging.WARNING]


@pytest.fixture
def ad() -> Iterator[AutoDist]:
    """Two replicas on one worker."""
    made = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    yield made
    made._alone.stop()


def end(ad: AutoDist) -> None:
    ad._alone.leave_state(has_idle_workers=False)


def model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def compiled() -> keras.Model:
    made = model()
    made.compile("sgd", "mse")
    return made


def test_training_outside_of_the_scope_is_told_with_its_line_and_the_mend(
    ad: AutoDist, said: pytest.LogCaptureFixture
) -> None:
    net = compiled()
    net.fit(X, Y, verbose=0)
    net.fit(X, Y, verbose=0)
    assert [r.levelno for r in records(said)] == [logging.INFO]
    end(ad)
    end(ad)
    (text,) = warnings(said)
    assert "2 replicas on 1 worker and trained on one device alone, by fit of a model" in text
    assert "(test_undistributed.py:" in text
    assert text.endswith("Build the model in `with ad.scope():`, or call fit in it.")


def test_a_step_that_is_no_ad_function_is_told_though_it_stands_in_the_scope(
    ad: AutoDist, said: pytest.LogCaptureFixture
) -> None:
    with ad.scope():
        net, optimizer = model(), keras.optimizers.SGD()

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(net(X)))
            optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))

        step()
    end(ad)
    (text,) = warnings(said)
    assert "Put @ad.function in place of @tf.function" in text


@pytest.mark.parametrize("where", ["all after", "compile after", "fit after", "fit alone"])
def test_a_model_of_the_scope_is_distributed_wherever_the_rest_stands(
    ad: AutoDist, said: pytest.LogCaptureFixture, where: str
) -> None:
    if where == "fit alone":
        net = compiled()
        with ad.scope():
            net.fit(X, Y, verbose=0)
    else:
        with ad.scope():
            net = compiled() if where == "fit after" else model()
        if where == "compile after":
            with ad.scope():
                net.compile("sgd", "mse")
        elif where == "all after":
            net.compile("sgd", "mse")
        net.fit(X, Y, verbose=0)
    end(ad)
    assert ad._run.steps.strategy is not None
    assert warnings(said) == []


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)


def functional() -> keras.Model:
    x = keras.Input((3,))
    return keras.Model(x, keras.layers.Dense(2)(x))


@pytest.mark.parametrize("build", [Subclassed, functional, lambda: keras.models.clone_model(model())])
def test_every_kind_of_model_remembers_where_it_was_built(
    ad: AutoDist, said: pytest.LogCaptureFixture, build: type[keras.Model]
) -> None:
    with ad.scope():
        net = build()
    net.compile("sgd", "mse")
    net.train_on_batch(X, Y)
    end(ad)
    assert ad._run.steps.strategy is not None
    assert warnings(said) == []


def test_tensorflow_is_as_it_was_at_the_end() -> None:
    before = [tf.GradientTape.gradient, tf.compat.v1.Session.run]
    made = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
    assert tf.GradientTape.gradient is not before[0]
    with made.scope():
        compiled().fit(X, Y, verbose=0)
    end(made)
    assert [tf.GradientTape.gradient, tf.compat.v1.Session.run] == before


def test_a_teacher_that_is_trained_first_is_noted_and_not_warned_of(
    ad: AutoDist, said: pytest.LogCaptureFixture
) -> None:
    teacher = compiled()
    teacher.fit(X, Y, verbose=0)
    with ad.scope():
        net = compiled()
    net.fit(X, teacher.predict(X, verbose=0), verbose=0)
    end(ad)
    assert warnings(said) == []
    assert records(said)[0].getMessage().startswith("so far on one device alone: fit of a model")


def test_local_training_after_distributed_training_causes_no_warning(
    ad: AutoDist, said: pytest.LogCaptureFixture
) -> None:
    with ad.scope():
        net = compiled()
    net.fit(X, Y, verbose=0)
    said.clear()
    compiled().fit(X, Y, verbose=0)
    end(ad)
    assert records(said) == []


def test_one_replica_is_told_nothing(said: pytest.LogCaptureFixture) -> None:
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]}))
    compiled().fit(X, Y, verbose=0)
    end(ad)
    assert records(said) == []


def test_another_worker_leaves_the_telling_to_the_chief(said: pytest.LogCaptureFixture) -> None:
    alone = UndistributedScript(ResourceSpec.from_dict(TWO), is_chief=False, is_in_scope=lambda graph: False)
    compiled().fit(X, Y, verbose=0)
    alone.leave_state(has_idle_workers=True)
    assert records(said) == []


def test_workers_that_were_started_for_nothing_are_told_of(said: pytest.LogCaptureFixture) -> None:
    alone = UndistributedScript(ResourceSpec.from_dict(TWO), is_chief=True, is_in_scope=lambda graph: False)
    alone.leave_state(has_idle_workers=True)
    assert warnings(said) == ["The other workers were started for nothing: no step ran on them."]


@pytest.mark.parametrize("is_in_scope", [True, False])
@pytest.mark.parametrize("divides_data", [True, False])
def test_a_plain_session_is_refused_where_it_would_train_on_a_part_of_the_data(
    said: pytest.LogCaptureFixture, is_in_scope: bool, divides_data: bool
) -> None:
    alone = UndistributedScript(ResourceSpec.from_dict(TWO), is_chief=True, is_in_scope=lambda graph: is_in_scope)
    alone.divides_data = divides_data
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        kernel = tf.compat.v1.get_variable("kernel", [3], use_resource=True)
        loss = tf.reduce_sum(tf.square(kernel))
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(tf.compat.v1.global_variables_initializer())
        if is_in_scope and divides_data:
            with pytest.raises(CaptureError, match="divides it among 2 workers"):
                session.run(train)
            alone.stop()
            return
        session.run(train)
    alone.leave_state(has_idle_workers=False)
    (text,) = warnings(said)
    assert "ad.create_distributed_session()" in text
    assert ("a part of the data was not used" in text) == divides_data


def test_of_several_the_last_that_was_made_says_so(said: pytest.LogCaptureFixture) -> None:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]})
    made = [AutoDist(resource_spec=spec) for _ in range(3)]  # as a notebook's cell that is run again
    compiled().fit(X, Y, verbose=0)
    for one in made:
        end(one)
    assert [r.levelno for r in records(said)] == [logging.INFO, logging.WARNING]
