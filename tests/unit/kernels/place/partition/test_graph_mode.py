"""TensorFlow 1 graphs with partitioned variables: every worker's rewritten session run, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.errors import StrategyError
from autodist.graph.editor import GraphEditor
from autodist.graph.step import Step
from autodist.kernels import SETTING_KERNELS, Context, Fetching, rewrite
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from tests.unit.kernels.graphs_in_one_process import Cluster
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.place.partition.shards import numbers, sharded_plan

v1 = tf.compat.v1
CUTS = {"v": Partitioning(0, (1, 3)), "table": Partitioning(0, (3, 4))}


def sharded(step: Step) -> strategy_pb2.Strategy:
    return sharded_plan(step, CUTS, 2)


def build(uses_loop: bool = False, measures: bool = False) -> None:
    """A graph that trains a matrix and an embedding by momentum; `measures` adds a metric of TensorFlow 1."""
    x, ids = v1.placeholder(tf.float64, [None, 4], "x"), v1.placeholder(tf.int32, [None, 2], "ids")
    v = v1.get_variable("v", initializer=numbers(0, 4, 3), use_resource=True)
    table = v1.get_variable("table", initializer=numbers(1, 7, 3), use_resource=True)
    hidden = tf.tanh(x @ v) * tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
    if uses_loop:
        turn = lambda k, y: (k + 1, tf.tanh(y * tf.reduce_sum(v, 0)))  # noqa: E731
        hidden += tf.while_loop(lambda k, _: k < 3, turn, (0, hidden))[1]
    loss = tf.reduce_mean(tf.square(hidden - 1.0), name="loss")
    v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, v1.train.get_or_create_global_step(), name="train")
    v.assign(2.0 * v, name="double")
    v.assign(v1.placeholder(tf.float64, [4, 3], "value"), name="load")
    value = v1.cond(v1.is_variable_initialized(v), v.read_value, lambda: v.initial_value)
    v1.get_variable("copy", initializer=value, use_resource=True)
    v1.get_variable("mean", initializer=np.zeros(3), use_resource=True).assign(tf.reduce_mean(v, 0), name="average")
    tf.identity(v, name="read")
    tf.reduce_all([v1.is_variable_initialized(one) for one in v1.global_variables()], name="ready")
    v1.global_variables_initializer()
    if measures:
        v1.metrics.mean(tf.square(hidden), name="metric")
        v1.variables_initializer(v1.local_variables(), name="init_metric")


@contextmanager
def built(
    planned: Callable[[Step], strategy_pb2.Strategy] = sharded,
    graph_of: Callable[..., None] = build,
    **options: bool,
) -> Iterator[tuple[Cluster, v1.Session]]:
    """The workers of a graph, and one device that runs the same."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        graph_of(**options)
        cluster = Cluster(graph, notes.calls, planned)
        with v1.Session(graph=graph) as alone, cluster.session:
            yield cluster, alone


def batches(count: int) -> list[dict[str, np.ndarray]]:
    ids = [np.random.default_rng(k).integers(0, 7, (6, 2)).astype(np.int32) for k in range(count)]
    return [{"x": numbers(k, 6, 4), "ids": one} for k, one in enumerate(ids)]


def assert_same_variables(cluster: Cluster, alone: v1.Session) -> None:
    reads = [f"{variable.handle}/Read/ReadVariableOp:0" for variable in cluster.captured.variables]
    expected = alone.run(reads)
    for found in cluster.run(reads):
        for read, one, other in zip(reads, found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=read)


def assert_trains_alike(cluster: Cluster, alone: v1.Session) -> None:
    cluster.run(targets=["init"])
    alone.run("init")
    for batch in batches(3):
        cluster.run(["loss:0"], ["train"], **batch)
        alone.run("train", {f"{name}:0": value for name, value in batch.items()})
    assert_same_variables(cluster, alone)


def test_initialisers_set_the_shards_and_a_fetch_gives_the_whole():
    with built() as (cluster, alone):
        assert cluster.run(["ready:0"]) == [[False], [False]]
        cluster.run(targets=["init"])
        alone.run("init")
        assert cluster.run(["ready:0"]) == [[True], [True]]
        assert_same_variables(cluster, alone)


def test_a_branch_reads_a_variable_after_the_check_that_it_is_initialized():
    """Otherwise an initialiser that runs concurrently could come between, and the branch would read the old value."""
    with built() as (cluster, _):
        step = replace(cluster.captured.step((), ["init"], {}), holders=cluster.holders)
        questions = {n.name for n in step.graph_def.node if n.op == "VarIsInitializedOp" and n.input[0] == "v"}
        assert len(questions) == 1
        made = rewrite(step, Context(cluster.strategy, 0, Fetching.BY_EACH), kernels=SETTING_KERNELS)
    editor = GraphEditor(made.graph_def)
    (read,) = (node.name for node in editor if node.name.startswith("v/whole/for/") and node.name.endswith("/refresh"))
    assert questions <= editor.ancestors([read])


@pytest.mark.parametrize("uses_loop", [False, True])
def test_a_graph_trains_what_one_device_does(uses_loop):
    with built(uses_loop=uses_loop) as (cluster, alone):
        assert_trains_alike(cluster, alone)


def accumulate() -> None:
    """Adds gradients up, and applies them every second run, in a branch; only its result is fetched."""
    x = v1.placeholder(tf.float64, [None, 4], "x")
    v = v1.get_variable("v", initializer=numbers(0, 4, 3), use_resource=True)
    (gradient,) = tf.gradients(tf.reduce_mean(tf.square(tf.tanh(x @ v) - 1.0)), [v])
    total = v1.get_variable("total", initializer=np.zeros((4, 3)), trainable=False, use_resource=True)
    count = v1.get_variable("count", initializer=0, trainable=False, use_resource=True)

    def apply() -> tf.Tensor:
        with tf.control_dependencies([v.assign_sub(0.1 * total)]):
            emptied = total.assign(tf.zeros_like(total))
        with tf.control_dependencies([emptied]):
            return tf.constant(1)

    with tf.control_dependencies([total.assign_add(gradient)]):
        counted = count.assign_add(1)
    tf.identity(tf.cond(tf.equal(counted % 2, 0), apply, lambda: tf.constant(0)), name="applied")
    v1.global_variables_initializer()


def test_a_branch_reads_what_was_written_before_it_and_its_writes_end_with_its_result():
    """In a graph of TensorFlow 1, nothing but its data orders a branch, and nothing lists what it writes."""
    with built(lambda step: sharded_plan(step, {"v": CUTS["v"]}, 2), accumulate) as (cluster, alone):
        cluster.run(targets=["init"])
        alone.run("init")
        for batch in batches(5):
            del batch["ids"]
            cluster.run(["applied:0"], **batch)
            alone.run("applied:0", {f"{name}:0": value for name, value in batch.items()})
            assert_same_variables(cluster, alone)


def test_a_metric_is_updated_in_a_run_of_its_own_from_variables_that_others_hold():
    with built(measures=True) as (cluster, alone):
        cluster.run(targets=["init", "init_metric"])
        alone.run(["init", "init_metric"])
        for batch in batches(3):
            fed = {f"{name}:0": value for name, value in batch.items()}
            found = [
                told[:1] for told in cluster.run(["metric/update_op:0"], **batch)
            ]  # and whether there are examples
            np.testing.assert_allclose(found, [[alone.run("metric/update_op:0", fed)]] * 2, rtol=1e-12)
            cluster.run(targets=["train"], **batch)
            alone.run("train", fed)
        np.testing.assert_allclose(cluster.run(["metric/value:0"]), [[alone.run("metric/value:0")]] * 2, rtol=1e-12)


def test_assignments_reach_the_shards():
    with built() as (cluster, alone):
        cluster.run(targets=["init"])
        alone.run("init")
        cluster.run(targets=["double"])
        alone.run("double")
        cluster.run(targets=["average"])
        alone.run("average")
        assert_same_variables(cluster, alone)
        value = numbers(5, 4, 3)
        cluster.run(targets=["load"], value=value)
        np.testing.assert_array_equal(cluster.run(["read:0"])[1][0], value)


def test_a_loop_of_tensorflow_1_reads_the_whole(first_control_flow):
    with built(uses_loop=True) as (cluster, alone):
        assert "Enter" in {op.type for op in alone.graph.get_operations()}
        assert_trains_alike(cluster, alone)


@pytest.mark.parametrize("local_proxy", [False, True])
def test_a_loop_of_tensorflow_1_reads_what_another_worker_holds(first_control_flow, local_proxy):
    """No node outside of a loop waits for one inside, as the gradients that are sent wait for reads."""
    owners = {"v": 0, "table": 1}
    with built(lambda step: plan(step, 2, 1, owners, local_proxy=local_proxy), uses_loop=True) as (cluster, alone):
        assert "Enter" in {op.type for op in alone.graph.get_operations()}
        assert_trains_alike(cluster, alone)


def test_a_branch_of_tensorflow_1_that_writes_is_refused(first_control_flow):
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 4], "x")
        v = v1.get_variable("v", initializer=numbers(0, 4, 3), use_resource=True)
        (gradient,) = tf.gradients(tf.reduce_mean(x @ v), [v])
        train = v1.cond(
            tf.reduce_sum(gradient) > 0.0, lambda: v.assign_sub(gradient), lambda: v.assign(gradient)
        ).op.name
    cluster = Cluster(graph, notes.calls, lambda step: sharded_plan(step, {"v": Partitioning(0, (1, 3))}))
    with pytest.raises(StrategyError, match=r"v is partitioned, and \w+ \(.*\) writes it inside a loop or a branch"):
        cluster.run(targets=[train], x=numbers(0, 6, 4))
