"""Asynchronous parameter servers: every worker's gradient is an update, and none is lost."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.batch.examples import share_of
from autodist.errors import StrategyError
from autodist.graph.names import is_control, node_of
from autodist.graph.step import EXAMPLES
from autodist.kernels import Context, rewrite
from tests.unit.kernels.drawn_steps import Choices, make_batches, make_step
from tests.unit.kernels.in_one_process import Session, capture, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

RATE = 0.25
OWNED = ("table", "kernel", "gain")


def linear_step():
    """A loss whose gradients do not depend on the variables: their order does not matter."""
    table = tf.Variable(np.zeros([6, 2]), name="table")
    kernel = tf.Variable(np.ones([2]), name="kernel")

    def step(ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids) + x * kernel, 1))
        rows, dense = tape.gradient(loss, [table, kernel])
        table.scatter_sub(tf.IndexedSlices(RATE * rows.values, rows.indices))
        kernel.assign_sub(RATE * dense)
        return loss

    return step


def linear_batches(sizes: Sequence[int]):
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 6, n).astype(np.int32), rng.normal(size=(n, 2))) for n in sizes]


def expected(batches, workers: int, replicas: int = 1) -> dict[str, np.ndarray]:
    """Each worker's mean over its own examples, all applied."""
    table, kernel = np.zeros([6, 2]), np.ones([2])
    for ids, x in batches:
        for worker in range(workers):
            share = share_of(len(ids), [w for w in range(workers) for _ in range(replicas)], worker)
            if share.size:
                own = slice(share.start, share.start + share.size)
                np.subtract.at(table, ids[own], RATE / share.size)
                kernel -= RATE * x[own].mean(0)
    return {"table": table, "kernel": kernel}


@pytest.mark.parametrize(
    "owners, replicas, staleness",
    [
        ({"table": 0, "kernel": 1}, 1, 2), ({"table": 0, "kernel": 1}, 2, 0), ({"table": 2, "kernel": 2}, 1, 0),
        ({"table": 2, "kernel": 2}, 2, 2), ({"table": 3, "kernel": 1}, 1, 2), ({"table": 3, "kernel": 1}, 2, 0),
    ],
)  # fmt: skip
def test_every_gradient_is_applied_once(owners, replicas, staleness):
    batches = linear_batches([7, 4, 1, 9])
    captured = capture(linear_step(), *batches[0])
    strategy = plan(captured.step, 3, replicas, owners, servers=1, asynchronous=True, staleness=staleness)
    trained = train(captured, strategy, batches)
    for name, value in expected(batches, 3, replicas).items():
        np.testing.assert_allclose(trained.variable(name), value, rtol=1e-12, atol=1e-12)


OWNERS = {"one owner": dict.fromkeys(OWNED, 1), "three owners": {"table": 0, "kernel": 2, "gain": 1}}


@pytest.mark.parametrize("optimizer, layout", pairs(["momentum", "adamw", "global norm", "clipped", "average"], OWNERS))
def test_every_optimizer_counts_all_workers_updates(optimizer, layout):
    owners = OWNERS[layout]
    batches = make_batches(2, [4, 4, 2])
    choices = Choices("mean", optimizer, is_tied=False, is_frozen=False, counts_steps=True)
    captured = capture(make_step(choices), *batches[0])
    trained = train(captured, plan(captured.step, 2, 1, owners, servers=1, asynchronous=True), batches)
    (iteration,) = [v.name for v in captured.step.variables if v.name.endswith("iteration")]
    assert trained.variable(iteration) == 2 * len(batches)
    assert trained.variable("seen") == len(batches)
    for name in owners:
        assert np.isfinite(trained.variable(name)).all()


def test_adam_of_one_worker_is_adam():
    batches = make_batches(2, [4, 3])
    choices = Choices("mean", "global norm", is_tied=True, is_frozen=False, counts_steps=False)
    captured = capture(make_step(choices), *batches[0])
    owners = {"table": 1, "kernel": 0, "gain": 2}
    alone = train(captured, plan(captured.step, 1, 1), batches)
    trained = train(captured, plan(captured.step, 1, 2, owners, servers=2, asynchronous=True), batches)
    for variable in captured.step.variables:
        np.testing.assert_allclose(trained.variable(variable.name), alone.variable(variable.name), rtol=1e-9)


def test_only_gradients_and_scalars_travel_to_the_owner():
    captured = capture(make_step(Choices("mean", "adam", False, False, False)), *make_batches(1, [2])[0])
    step = rewritten(captured, plan(captured.step, 2, 1, dict.fromkeys(OWNED, 1), asynchronous=True))[0]
    nodes = {node.name: node for node in step.graph_def.node}
    sent = {
        node_of(i) for node in nodes.values() for i in node.input
        if node.op != "ResourceGather"  # only its ids are sent
        and "task:1" in node.device and not is_control(i) and "task:0" in nodes[node_of(i)].device
    }  # fmt: skip
    gradients = {name for name in sent if nodes[name].op == "QueueDequeueV2"}
    assert len(gradients) == 2  # the rows of the table's, and a pack of the other two
    scalars = sent - gradients
    assert scalars
    assert all(name.startswith("autodist/standing/begin/") for name in scalars)


def test_a_norm_over_asynchronous_and_synchronous_gradients_is_refused():
    captured = capture(make_step(Choices("mean", "global norm", False, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, 1, {"table": 0, "kernel": 1}, asynchronous=True)
    told = r"kernel \(asynchronous\) and gain \(synchronous\), which meet in .*different times.*`sync`"
    with pytest.raises(StrategyError, match=told):
        rewrite(captured.step, Context(strategy, 0))


def test_asynchronous_and_synchronous_variables_stand_side_by_side():
    batches = linear_batches([4, 6])
    captured = capture(linear_step(), *batches[0])
    trained = train(captured, plan(captured.step, 2, 1, {"table": 1}, asynchronous=True), batches)
    np.testing.assert_allclose(trained.variable("table"), expected(batches, 2)["table"], rtol=1e-12)
    whole = np.ones(2) - RATE * sum(x.mean(0) for _, x in batches)
    np.testing.assert_allclose(trained.variable("kernel"), whole, rtol=1e-12)


def test_averages_of_batches_are_each_workers_own():
    layer = keras.layers.BatchNormalization(dtype="float64", momentum=0.5)
    layer.build((None, 3))
    kernel = tf.Variable(np.ones([3, 2]), name="kernel")
    last = tf.Variable(0, dtype=tf.int64, name="last", trainable=False)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x, training=True) @ kernel)
        kernel.assign_sub(tape.gradient(loss, kernel))
        last.assign(tf.cast(1000.0 * tf.reduce_max(x), tf.int64))
        return loss

    batch = np.abs(np.random.default_rng(1).normal(size=(5, 3)))
    captured = capture(step, batch)
    trained = train(captured, plan(captured.step, 2, 1, {"kernel": 2}, servers=1, asynchronous=True), [(batch,)])
    (name,) = [v.name for v in captured.step.variables if v.name.endswith("moving_mean")]
    first, second, without = (values[name] for values in trained.variables)
    np.testing.assert_allclose(first, 0.5 * batch[:3].mean(0))
    np.testing.assert_allclose(second, 0.5 * batch[3:].mean(0))
    np.testing.assert_array_equal(without, np.zeros(3))
    assert [values["last"] for values in trained.variables] == [
        int(1000.0 * batch[:3].max()), int(1000.0 * batch[3:].max()), 0
    ]  # fmt: skip
    losses = [outputs[0] for outputs in trained.outputs[0]]
    assert losses[0] != losses[1]
    assert losses[2] == 0


@pytest.mark.parametrize("sizes, is_refused", [([4, 4], False), ([4, 2], False), ([3, 2], True)])
def test_parts_have_to_be_even_on_each_worker_alone_where_the_loss_is_not_understood(sizes, is_refused):
    kernel = tf.Variable(np.ones([3]), name="kernel")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * kernel) + 0.0 * x[0, 0]  # it takes a row by its position
        kernel.assign_sub(tape.gradient(loss, kernel))

    captured = capture(step, np.ones([4, 3]))
    strategy = plan(captured.step, 2, 2, {"kernel": 0}, asynchronous=True)
    session = FedSession(captured, strategy, sizes)
    if not is_refused:
        session.train([(np.ones([8, 3]),)])
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of examples"):
        session.train([(np.ones([8, 3]),)])


class FedSession(Session):
    """Each worker is fed rows of its own."""

    def __init__(self, captured, strategy, sizes):
        super().__init__(captured, strategy)
        self.sizes = sizes

    def _feeds(self, worker, step, batch):
        fed = super()._feeds(worker, step, batch)
        (name,) = self.captured.step.inputs
        fed[f"worker_{worker}/{name}"] = batch[0][: self.sizes[worker]]
        fed[f"worker_{worker}/{EXAMPLES}"] = self.sizes[worker]
        return fed


def two_rounds(kernel, gain, seen):
    def step(x):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x * kernel) * gain)
            first, second = tape.gradient(loss, [kernel, gain])
            kernel.assign_sub(RATE * first)
            gain.assign_sub(RATE * second + 0.1 * kernel[0])
        return loss, kernel + 1.0

    return step


def counted(kernel, gain, seen):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * kernel) * gain)
        first, second = tape.gradient(loss, [kernel, gain])
        seen.assign_add(1.0)
        kernel.assign_sub(first / seen)
        seen.assign_add(kernel[0])
        gain.assign_sub(second / seen)
        return tf.norm(first), seen + 0.0, gain + 0.0

    return step


def under_a_condition(kernel, gain, seen):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * kernel) * gain)
        first, second = tape.gradient(loss, [kernel, gain])
        seen.assign_add(1.0)

        tf.cond(tf.reduce_sum(first) > 0.0, lambda: kernel.assign_sub(first * seen), lambda: kernel + 0.0)
        seen.assign_add(2.0)
        gain.assign_sub(RATE * second)
        return seen + 0.0

    return step


@pytest.mark.parametrize(
    "make, owners, local_proxy",
    [
        (two_rounds, {"kernel": 1, "gain": 1}, False), (two_rounds, {"kernel": 2, "gain": 1}, True),
        (counted, {"kernel": 1, "gain": 1}, True), (counted, {"kernel": 2, "gain": 1}, False),
        (under_a_condition, {"kernel": 1, "gain": 1}, False), (under_a_condition, {"kernel": 2, "gain": 1}, True),
    ],
)  # fmt: skip
def test_one_worker_trains_as_one_device(make, owners, local_proxy):
    kernel = tf.Variable(np.array([0.5, 2.0]), name="kernel")
    gain = tf.Variable(np.float64(1.0), name="gain")
    step = make(kernel, gain, tf.Variable(np.float64(0.0), name="seen", trainable=False))
    batches = [(np.linspace(0.1, 0.8, 2 * n).reshape(n, 2),) for n in (3, 2, 4)]
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, 1, 1, owners, servers=2, asynchronous=True, local_proxy=local_proxy)
    found, alone = train(captured, strategy, batches), train(captured, plan(captured.step), batches)
    for variable in captured.step.variables:
        np.testing.assert_allclose(
            found.variables[0].get(variable.name, found.variable(variable.name)), alone.variable(variable.name),
            rtol=1e-12, err_msg=variable.name,
        )  # fmt: skip
    for outputs, expected_outputs in zip(found.outputs, alone.outputs, strict=True):
        for one, other in zip(outputs[0], expected_outputs[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
