"""Losses in graphs that combine sums and means of the batch with single examples train as on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.global_statistics_in_graphs import GraphBatchStatistics
from autodist.capture.gradients import GradientNotes, recording_gradients
from autodist.capture.in_step_all_reduces import AllReduceNotes, recording_all_reduces
from autodist.graph import batch_statistics
from autodist.tf_compat.patches import replaced
from tests.unit.kernels.graphs_in_one_process import Cluster
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.test_global_statistics import covariances, normalised_advantages

v1 = tf.compat.v1

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Values = dict[str, np.ndarray]

BATCHES = [np.random.default_rng(n).normal(3.0, 2.0, size=(n, 3)) for n in (8, 7, 4)]
"""Batches that are uneven for four replicas; the last has one row for each."""


def deviation(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(made)) + 0.3 * tf.math.reduce_std(made)


def variance(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.math.reduce_variance(made - x[:, :2], 0))


def deviation_of_deviations(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    apart = tf.square(made - tf.reduce_mean(made, 0))
    return tf.reduce_mean(tf.abs(apart - tf.math.reduce_std(apart, 0)))


def normalised_by_hand(made: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(made, [0])
    return tf.reduce_mean((tf.nn.batch_normalization(made, mean, variance, None, None, 1e-3) - x[:, :2]) ** 2)


LOSSES = [deviation, variance, deviation_of_deviations, normalised_by_hand, normalised_advantages, covariances]


@contextmanager
def noting() -> Iterator[tuple[tf.Graph, GradientNotes, AllReduceNotes]]:
    with (
        tf.Graph().as_default() as graph,
        recording_all_reduces(in_functions=False) as sums,
        recording_gradients(in_functions=False, decomposer=GraphBatchStatistics(sums)) as notes,
    ):
        yield graph, notes, sums


def build(*losses: Loss) -> None:
    """A graph that trains by each of the losses in turn, and returns them."""
    rng = np.random.default_rng(1)
    x = v1.placeholder(tf.float64, [None, 3], "x")
    first, last = (
        tf.Variable(rng.normal(size=shape), name=name) for shape, name in (((3, 4), "first"), ((4, 2), "last"))
    )
    made = tf.tanh(x @ first) @ last
    values = [loss(made, x) for loss in losses]
    updates = []
    for value in values:
        with tf.control_dependencies(updates):
            updates = [v1.train.MomentumOptimizer(0.1, 0.5).minimize(value, var_list=[first, last])]
    tf.group(*updates, name="train")
    tf.identity(tf.add_n(values), name="loss")
    tf.group(v1.global_variables_initializer(), name="init")
    for variable in (first, last):
        tf.identity(variable, name=f"{variable.op.name}_value")


READ = ["first_value:0", "last_value:0"]


def of_one_device(*losses: Loss) -> tuple[list[np.ndarray], list[float]]:
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        build(*losses)
        session.run("init")
        found = [session.run(["train", "loss:0"], {"x:0": batch})[1] for batch in BATCHES]
        return session.run(READ), found


@pytest.mark.feature("session", "loss: examples beside sums and means of the batch")
@pytest.mark.parametrize(
    "losses, shape, owners",
    [
        ((deviation,), (1, 2), {}),
        ((variance, deviation), (2, 1), {}),
        *(((loss,), (2, 2 - k % 2), {"first": 0, "last": 1}) for k, loss in enumerate(LOSSES)),
    ],
    ids=lambda value: "-".join(getattr(one, "__name__", str(one)) for one in value),
)
def test_they_are_those_of_the_whole_batch(
    losses: tuple[Loss, ...], shape: tuple[int, int], owners: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "autodist")
    wanted, at_each = of_one_device(*losses)
    with noting() as (graph, notes, sums):
        build(*losses)
    cluster = Cluster(graph, notes.calls, lambda step: plan(step, *shape, owners), sums.sums)
    cluster.run(targets=["init"])
    for batch, loss in zip(BATCHES, at_each, strict=True):
        for found, *_ in cluster.run(["loss:0"], ["train"], fetches_alike=True, x=batch):
            np.testing.assert_allclose(found, loss, rtol=1e-10)
    for value in cluster.run(READ):
        for found, expected in zip(value, wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert not any("see only those of" in message or "sees only those of" in message for message in caplog.messages)


def test_of_a_loss_that_needs_none_the_graph_stays_as_it_was() -> None:
    with noting() as (graph, _, sums):
        build(lambda made, x: tf.reduce_mean(tf.square(made)))
    assert not sums.sums and not any(op.name.startswith("autodist_whole") for op in graph.get_operations())


def test_the_graph_stays_if_another_obstacle_remains() -> None:
    with noting() as (graph, _, sums):
        build(lambda made, x: tf.reduce_mean(tf.sort(tf.abs(made - tf.reduce_mean(made)), axis=0)[0]))
        read = graph.get_operation_by_name("sub").inputs[1]
    assert not sums.sums and read.name == "Mean:0"


def test_every_process_gives_the_exchanges_the_same_names() -> None:
    """The order of a set of names is another one in each process."""

    def names() -> list[str]:
        with noting() as (_, _, sums):
            build(covariances)
        return [one.all_reduce.node for one in sums.sums]

    plain = batch_statistics._mixing
    with replaced(batch_statistics, "_mixing", lambda *args: sorted(plain(*args))):
        first = names()
    with replaced(batch_statistics, "_mixing", lambda *args: sorted(plain(*args), reverse=True)):
        assert names() == first
