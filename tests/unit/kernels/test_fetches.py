"""Fetches of several workers' sessions besides a training step, under every kind of owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.errors import FetchedElsewhereError
from autodist.graph.step import Step
from autodist.proto import strategy_pb2
from tests.unit.kernels.graphs_in_one_process import Cluster
from tests.unit.kernels.in_one_process import plan

v1 = tf.compat.v1

OWNERS = {
    "all-reduce": {},
    "one owner": {"table": 0, "weight": 0, "bias": 0},
    "two owners": {"table": 1, "weight": 0, "bias": 1},
    "tables alone": {"table": 0},
}


def build() -> None:
    """A graph whose updates read only the variable that they write."""
    x, ids = v1.placeholder(tf.float64, [None, 3], "x"), v1.placeholder(tf.int32, [None, 2], "ids")
    weight = v1.get_variable("weight", initializer=np.linspace(-1.0, 1.0, 3), use_resource=True)
    bias = v1.get_variable("bias", initializer=np.float64(0.5), use_resource=True)
    table = v1.get_variable("table", initializer=np.linspace(0.0, 2.0, 10).reshape(5, 2), use_resource=True)
    out = tf.linalg.matvec(x, weight) + bias + tf.reduce_sum(tf.nn.embedding_lookup(table, ids), [1, 2])
    loss = tf.reduce_mean(tf.square(out - 1.0), name="loss")
    optimizer = v1.train.GradientDescentOptimizer(0.05)
    gradients = optimizer.compute_gradients(loss)
    tf.linalg.global_norm([gradient for gradient, _ in gradients], "norm")
    optimizer.apply_gradients(gradients, name="train")
    v1.global_variables_initializer()


@contextmanager
def built(owners: str, **options: bool) -> Iterator[tuple[Cluster, v1.Session]]:
    """The workers of a graph, and one device that runs the same."""

    def two_workers(step: Step) -> strategy_pb2.Strategy:
        return plan(step, 2, 1, OWNERS[owners], **options)

    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        build()
        cluster = Cluster(graph, notes.calls, two_workers)
        with v1.Session(graph=graph) as alone, cluster.session:
            cluster.run(targets=["init"])
            alone.run("init")
            yield cluster, alone


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rngs = map(np.random.default_rng, range(count))
    return [{"x": r.normal(size=(6, 3)), "ids": r.integers(0, 5, (6, 2)).astype(np.int32)} for r in rngs]


def fed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}:0": value for name, value in batch.items()}


@pytest.mark.feature("session", "fetches: variables beside the training")
@pytest.mark.parametrize("owners", OWNERS)
def test_a_variable_is_fetched_beside_training_as_it_was_before(owners):
    fetched = [f"{name}/Read/ReadVariableOp:0" for name in ("weight", "bias", "table")]
    with built(owners) as (cluster, alone):
        for batch in batches(3):
            before = alone.run(fetched)
            alone.run("train", fed(batch))
            for found in cluster.run(fetched, ["train"], **batch):
                for one, other in zip(found, before, strict=False):  # whether there are examples comes last
                    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.feature("session", "fetches: norms of gradients")
@pytest.mark.parametrize("owners", OWNERS)
def test_a_loss_gradients_and_their_norm_are_of_the_whole_batch_where_all_workers_fetch_them(owners):
    with built(owners) as (cluster, alone):
        gradients = cluster.captured.whole().gradients
        dense = [g.tensors[0] for g in gradients if g.variable in ("weight", "bias")]
        fetched = ["norm/global_norm:0", "loss:0", *dense]
        for batch in batches(3):
            wanted, _ = alone.run((fetched, "train"), fed(batch))
            for found in cluster.run(fetched, ["train"], fetches_alike=True, **batch):
                for one, other in zip(found, wanted, strict=False):  # whether there are examples comes last
                    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_the_value_of_another_worker_is_refused_if_workers_may_fetch_different_values():
    with built("two owners") as (cluster, _), pytest.raises(FetchedElsewhereError, match="Fetch it on every worker"):
        cluster.run(["norm/global_norm:0"], ["train"], **batches(1)[0])


def test_a_variable_is_fetched_twice():
    """Two reads that wait for the same become one at the owner."""
    with built("one owner") as (cluster, _):
        for found in cluster.run(["bias/Read/ReadVariableOp:0"] * 2, ["train"], **batches(1)[0]):
            assert found[:2] == [0.5, 0.5]
