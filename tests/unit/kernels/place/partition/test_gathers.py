"""Gathers from a partitioned variable read from each shard only the rows that it holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.graph.names import node_of
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import Session, capture, one_device, plan, rewritten
from tests.unit.kernels.place.partition.shards import assert_trains_alike, cut_in_strategy, numbers, sharded_plan

ROWS, WIDTH = 7, 4
BY_ROWS, BY_COLUMNS = Partitioning(0, (3, 1, 3)), Partitioning(1, (1, 3))


def table_step(axes: int = 2) -> tuple[CapturedFunction, Callable[..., object]]:
    """A step of ids that trains rows by SGD and returns them."""
    table = tf.Variable(numbers(0, ROWS, WIDTH), name="table")

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = tf.gather(table, ids)
            loss = tf.reduce_mean(tf.reduce_sum(tf.reshape(tf.square(found - 1.0), [tf.shape(ids)[0], -1]), 1))
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return found

    return capture(step, np.zeros([4] + [2] * (axes - 1), np.int32)), step


def ids(seed: int, *shape: int) -> tuple[np.ndarray]:
    return (np.random.default_rng(seed).integers(0, ROWS, shape).astype(np.int32),)


@pytest.mark.parametrize("axes, cut", [(1, BY_ROWS), (2, BY_COLUMNS), (3, BY_ROWS), (3, BY_COLUMNS)])
def test_ids_may_have_any_rank(axes, cut):
    captured, step = table_step(axes)
    strategy = sharded_plan(captured.step, {"table": cut})
    found = Session(captured, strategy).train([ids(0, 6, *[2] * (axes - 1))])
    expected = one_device(captured, step, [ids(0, 6, *[2] * (axes - 1))])
    np.testing.assert_allclose(found.variable("table"), expected.variables[0]["table"], rtol=1e-12)
    rows = np.concatenate([outputs[0] for outputs in found.outputs[0]])
    np.testing.assert_allclose(rows, expected.outputs[0][0][0], rtol=1e-12)


@pytest.mark.parametrize("cut", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_a_single_id_asks_for_one_row(cut):
    table = tf.Variable(numbers(0, ROWS, WIDTH), name="table")

    def step(x: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ tf.gather(table, row)[:, None])
        table.scatter_sub(tf.IndexedSlices(*_values_and_ids(tape.gradient(loss, table))))
        return loss

    batches = [(numbers(k, 4, WIDTH), np.int32(row)) for k, row in enumerate([5, 0, 3])]
    captured = capture(step, *batches[0])
    assert_trains_alike(captured, step, sharded_plan(captured.step, {"table": cut}), batches)


def _values_and_ids(gradient: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return 0.1 * gradient.values, gradient.indices


@pytest.mark.parametrize("cut", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_no_ids_give_no_rows(cut):
    table = tf.Variable(numbers(0, ROWS, WIDTH), name="table")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            chosen = tf.cast(tf.boolean_mask(x[:, 0], x[:, 0] > 100.0), tf.int64)
            loss = tf.reduce_sum(tf.gather(table, chosen))
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(*_values_and_ids(gradient)))
        return tf.reduce_mean(x)

    batches = [(numbers(0, 4, 2),)]
    captured = capture(step, *batches[0])
    found = assert_trains_alike(captured, step, sharded_plan(captured.step, {"table": cut}), batches)
    np.testing.assert_array_equal(found.variable("table"), table.numpy())


@pytest.mark.parametrize("cut, wrong", [(BY_ROWS, -1), (BY_ROWS, ROWS), (BY_COLUMNS, ROWS)])
def test_an_id_out_of_range_fails_as_on_one_device(cut, wrong):
    captured, step = table_step(1)
    batch = (np.array([0, wrong, 1, 2], np.int32),)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(batch[0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
        Session(captured, sharded_plan(captured.step, {"table": cut})).train([batch], limit_ms=20_000)


def test_shards_are_asked_for_rows_and_never_read():
    captured, _ = table_step()
    gathered = set()
    for worker, step in enumerate(rewritten(captured, sharded_plan(captured.step, {"table": BY_ROWS}))):
        assert "ReadVariableOp" not in [node.op for node in step.graph_def.node]
        shards = {step.by_handle[node_of(node.input[0])].name for node in step.graph_index.of_op("ResourceGather")}
        assert all(step.owners[shard] == worker for shard in shards)
        gathered |= shards
    assert len(gathered) == len(BY_ROWS.sizes)


def test_each_shard_gets_its_own_rows_of_a_sparse_gradient():
    captured, _ = table_step(1)
    strategy = plan(captured.step, 2, 1)
    cut_in_strategy(strategy, "table", BY_ROWS, [1, 0, 1])
    session = Session(captured, strategy)
    asked = np.array([6, 2, 3, 2, 5, 0], np.int32)
    step = session.steps[1]
    places = {
        node.input[0]: node.input[1] for node in step.graph_def.node if node.op == "ResourceScatterNdSub"
    }  # fmt: skip
    handles = [step.by_name[f"table/shard_{k}"].handle for k in (0, 2)]
    assert sorted(places) == sorted(handles)
    first, third = session.fetch_once((asked,), [f"worker_1/{places[handle]}:0" for handle in handles])
    assert sorted(first.ravel()) == [0, 2, 2]
    assert sorted(third.ravel()) == [1, 2]
