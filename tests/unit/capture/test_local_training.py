"""Undistributed training is detected in every form; steps that only read gradients are not training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.ops import gradients_util

from autodist.capture.function import capture_function
from autodist.capture.gradients import recording_gradients
from autodist.capture.local_steps import LocalStep, TrainingKind
from autodist.capture.local_training import LocalTraining
from autodist.capture.training_hooks import put_back

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


@pytest.fixture
def seen() -> Iterator[list[LocalStep]]:
    found: list[LocalStep] = []
    looking = LocalTraining(found.append)
    yield found
    looking.stop()


def look(script: Callable[[], object]) -> LocalStep | None:
    """Returns the local training detected by the end of a script."""
    looking = LocalTraining(lambda step: None)
    try:
        script()
        return looking.look_again()
    finally:
        looking.stop()


def model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def compiled(**settings: object) -> keras.Model:
    made = model()
    made.compile("sgd", "mse", **settings)
    return made


def loss_of(net: keras.Model) -> tf.Tensor:
    return tf.reduce_mean(tf.square(net(X) - Y))


@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_fit_is_seen_with_its_line(seen: list[LocalStep], method: str, eagerly: bool) -> None:
    net = compiled(run_eagerly=eagerly)
    getattr(net, method)(X, Y)
    (step,) = seen
    assert step.kind is TrainingKind.FIT
    assert step.line.startswith("test_local_training.py:")


@pytest.mark.parametrize("wrap, way", [(tf.function, TrainingKind.FUNCTION), (lambda f: f, TrainingKind.EAGER)])
def test_a_keras_optimizer_is_seen_where_it_applies(
    seen: list[LocalStep], wrap: Callable[..., Callable[[], None]], way: TrainingKind
) -> None:
    net, optimizer = model(), keras.optimizers.Adam()

    @wrap
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(net)
        optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))

    step()
    step()
    assert [s.kind for s in seen] == [way]


@pytest.mark.parametrize("wrap, way", [(tf.function, TrainingKind.FUNCTION), (lambda f: f, TrainingKind.EAGER)])
@pytest.mark.parametrize("side", [3, 300])
def test_updates_without_an_optimizer_are_known_by_what_they_change(
    wrap: Callable[..., Callable[[], None]], way: TrainingKind, side: int
) -> None:
    def script() -> None:
        kernel = tf.Variable(np.ones((side, side)))

        @wrap
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(kernel))
            kernel.assign_sub(tape.gradient(loss, kernel))

        step()

    step = look(script)
    assert step is not None
    assert step.kind is way


def test_variables_that_a_function_makes_itself_are_seen() -> None:
    made: list[tf.Variable] = []

    @tf.function
    def step() -> None:
        if not made:
            made.append(tf.Variable([1.0, 2.0]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(made[0]))
        made[0].assign_sub(tape.gradient(loss, made[0]))

    assert look(step) is not None


def test_a_loop_is_seen_while_it_runs(seen: list[LocalStep]) -> None:
    kernel = tf.Variable([3.0])
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(kernel))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
    assert [s.kind for s in seen] == [TrainingKind.EAGER]


def saliency() -> None:
    net, x = model(), tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(net(x))
    assert tape.gradient(loss, x) is not None


def norms_of_gradients() -> None:
    net = compiled()
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = loss_of(net)
        tf.linalg.global_norm(tape.gradient(loss, net.trainable_variables))


def evaluation() -> None:
    net = compiled()
    net.evaluate(X, Y, verbose=0)
    net.predict(X, verbose=0)


def input_trained() -> None:
    """Moves a tensor that is not a model's variable along its gradient: an adversarial example."""
    x = tf.constant(X)
    net = model()
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(net(x))
        x = x + tape.gradient(loss, x)


@pytest.mark.parametrize("script", [saliency, norms_of_gradients, evaluation, input_trained])
def test_a_step_that_trains_no_variable_is_no_training(script: Callable[[], None]) -> None:
    assert look(script) is None


def test_a_captured_step_is_no_local_training(seen: list[LocalStep]) -> None:
    net, optimizer = model(), keras.optimizers.SGD()
    optimizer.build(net.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x)))
        optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))
        return loss

    capture_function(step, (tf.TensorSpec([None, 3]),), [0])
    assert seen == []


class Graph:
    """A graph that trains a variable, and ways to run parts of it."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
            self.kernel = tf.compat.v1.get_variable("kernel", [3, 1], use_resource=True)
            self.loss = tf.reduce_mean(tf.square(self.x @ self.kernel))
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            self.pairs = optimizer.compute_gradients(self.loss, [self.kernel])
            self.train = optimizer.apply_gradients(self.pairs)
            self.initialize = tf.compat.v1.global_variables_initializer()


def test_a_session_that_trains_is_seen_and_one_that_evaluates_is_not(seen: list[LocalStep]) -> None:
    made = Graph()
    with tf.compat.v1.Session(graph=made.graph) as session:
        session.run(made.initialize)
        session.run([made.loss, made.pairs[0][0]], {made.x: X})
        session.run({"kernel": made.kernel, "name": "x:0"}, {made.x: X})
        with pytest.raises(ValueError, match="nothing"):
            session.run("nothing", {made.x: X})
        assert seen == []
        session.run([made.loss, made.train], {made.x: X})
    assert [(s.kind, s.graph) for s in seen] == [(TrainingKind.SESSION, made.graph)]


@pytest.mark.parametrize("run", ["monitored", "callable", "by name"])
def test_every_way_of_running_a_graph_is_seen(seen: list[LocalStep], run: str) -> None:
    made = Graph()
    with made.graph.as_default():
        if run == "monitored":
            with tf.compat.v1.train.MonitoredTrainingSession() as session:
                assert seen == []
                session.run(made.train, {made.x: X})
        else:
            with tf.compat.v1.Session() as session:
                session.run(made.initialize)
                if run == "callable":
                    session.make_callable(made.train, [made.x])(X)
                else:
                    session.run(made.train.name, {made.x: X})
    assert [s.kind for s in seen] == [TrainingKind.SESSION]


def test_an_error_of_the_listener_is_raised_each_time() -> None:
    def refuse(step: LocalStep) -> None:
        raise LookupError("not here")

    looking = LocalTraining(refuse)
    made = Graph()
    try:
        with tf.compat.v1.Session(graph=made.graph) as session:
            session.run(made.initialize)
            for _ in range(2):
                with pytest.raises(LookupError):
                    session.run(made.train, {made.x: X})
    finally:
        looking.stop()


def hooked() -> list[object]:
    optimizer = next(base for base in keras.optimizers.Optimizer.__mro__ if "apply" in vars(base))
    return [
        optimizer.apply,
        tf.GradientTape.gradient,
        gradients_util._GradientsHelper,
        BaseSession.run,
        BaseSession.make_callable,
    ]


def test_tensorflow_is_as_it_was_when_nobody_looks_any_more() -> None:
    before = hooked()
    one, other = LocalTraining(lambda step: None), LocalTraining(lambda step: None)
    assert all(now is not then for now, then in zip(hooked(), before, strict=True))
    one.stop()
    with recording_gradients():
        other.stop()  # within another's patches ours rest
    put_back()
    assert hooked() == before


def test_a_monitored_session_with_hooks_is_seen(seen: list[LocalStep]) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=1.0, use_resource=True)
        step = v1.train.get_or_create_global_step()
        train = v1.train.GradientDescentOptimizer(0.1).minimize(weight * weight, step)
        hooks = [v1.train.StopAtStepHook(last_step=2), v1.train.StepCounterHook(1)]
        with v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
    assert {one.kind for one in seen} == {TrainingKind.SESSION}


def test_graphs_are_let_go() -> None:
    looking = LocalTraining(lambda step: None)
    made = Graph()
    there = weakref.ref(made.graph)
    with tf.compat.v1.Session(graph=made.graph) as session:
        session.run(made.initialize)
    del made, session
    gc.collect()
    looking.stop()
    assert there() is None
