"""Owners read their variables for the replicas of other workers, which send indices and receive rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.graph.inboxes import inboxes_of
from autodist.graph.names import node_of
from autodist.graph.step import Step
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import Batch, Session, assert_same, capture, one_device, plan, rewritten
from tests.unit.kernels.in_one_session import readers_of, workers_of
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import cut_in_strategy

ROWS, WIDTH = 12, 3

Function = Callable[..., object]


def variable(name: str, *shape: int) -> keras.Variable:
    value = np.random.default_rng(len(name)).normal(size=shape)
    return keras.Variable(value, dtype="float64", name=name)


def trained(
    variables: Sequence[keras.Variable],
    loss_of: Callable[[tf.Tensor], tf.Tensor],
    optimizer_class: type[keras.optimizers.Optimizer] = keras.optimizers.Adagrad,
) -> Function:
    """A step of ids (int32, n × 2) that trains variables."""
    optimizer = optimizer_class(0.1)
    optimizer.build(variables)

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(ids)
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def two_lookups() -> Function:
    table, head = variable("table", ROWS, WIDTH), variable("head", WIDTH)

    def loss_of(ids: tf.Tensor) -> tf.Tensor:
        first, second = (tf.gather(table.value, ids[:, k]) for k in range(2))
        return tf.reduce_mean(tf.square(tf.linalg.matvec(first * second, head.value) - 1.0))

    return trained([table, head], loss_of)


def tied_head() -> Function:
    """The table is read as a whole, too."""
    table = variable("table", ROWS, WIDTH)

    def loss_of(ids: tf.Tensor) -> tf.Tensor:
        scores = tf.linalg.matmul(tf.gather(table.value, ids[:, 0]), table.value, transpose_b=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 1], scores))

    return trained([table], loss_of)


def chained_lookups() -> Function:
    """The rows of one table decide on the rows of the other."""
    table, other = variable("table", ROWS, WIDTH), variable("other", ROWS, WIDTH)

    def loss_of(ids: tf.Tensor) -> tf.Tensor:
        rows = tf.gather(table.value, ids)
        following = tf.math.floormod(tf.cast(tf.abs(rows[..., 0]) * 100.0, tf.int64), ROWS)
        return tf.reduce_mean(tf.square(tf.reduce_sum(rows + tf.gather(other.value, following), [1, 2])))

    return trained([table, other], loss_of)


def loop() -> Function:
    """The body of a loop takes the handle."""
    table = variable("table", ROWS, WIDTH)

    def loss_of(ids: tf.Tensor) -> tf.Tensor:
        start = tf.zeros([tf.shape(ids)[0], WIDTH], tf.float64)
        _, last = tf.while_loop(
            lambda k, _: k < 2, lambda k, y: (k + 1, tf.tanh(y + tf.gather(table.value, ids[:, k]))), (0, start)
        )
        return tf.reduce_mean(tf.square(last))

    return trained([table], loss_of, keras.optimizers.SGD)


def prediction_after_update() -> Function:
    table = variable("table", ROWS, WIDTH)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([table])

    def step(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(table.value, ids) - 1.0))
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
        return loss, tf.reduce_mean(tf.gather(table.value, ids))

    return step


def returned_value() -> Function:
    table = variable("table", ROWS, WIDTH)
    step = trained([table], lambda ids: tf.reduce_mean(tf.square(tf.gather(table.value, ids) - 1.0)))

    def run(ids: tf.Tensor) -> tuple[tf.Tensor, object]:
        value = tf.identity(table.value)
        return value, step(ids)

    return run


STEPS = {
    make.__name__: make
    for make in (two_lookups, tied_head, chained_lookups, loop, prediction_after_update, returned_value)
}
BATCHES: Sequence[Batch] = [
    (np.random.default_rng(k).integers(0, ROWS, (size, 2)).astype(np.int32),) for k, size in enumerate((7, 4, 1, 6))
]


def by_owners(captured: CapturedFunction, layout: str) -> strategy_pb2.Strategy:
    names = [v.name for v in captured.step.variables]
    if layout == "partitioned":
        strategy = plan(captured.step, 2, 1, dict.fromkeys(names, 1))
        cut_in_strategy(strategy, "table", Partitioning(0, (5, 4, 3)), (1, 0, 1))
        return strategy
    workers, replicas, servers, owners = {
        "several replicas": (2, 3, 0, (1, 0)),
        "a server": (2, 1, 1, (2,)),
        "three owners": (3, 1, 0, (2, 1)),
        "an idle worker": (2, 2, 1, (0, 1)),
    }[layout]
    return plan(
        captured.step, workers, replicas, {n: owners[k % len(owners)] for k, n in enumerate(names)}, servers=servers
    )


LAYOUTS = ("several replicas", "a server", "three owners", "an idle worker", "partitioned")


@pytest.mark.parametrize("name, layout", pairs(STEPS, LAYOUTS))
def test_training_is_that_of_one_device_and_a_step_names_no_other_worker(name: str, layout: str):
    step = STEPS[name]()
    captured = capture(step, *BATCHES[0])
    strategy = by_owners(captured, layout)
    session = Session(captured, strategy)
    for worker, item in enumerate(session.steps):
        assert workers_of(item) == {worker}
    assert_same(session.train(BATCHES), one_device(captured, step, BATCHES))


def sent(step: Step) -> Counter[tuple[str, int]]:
    """The number of messages of remote reads that a worker sends to each other one, by tag."""
    nodes = step.graph_index.nodes
    queues = {name: nodes[node_of(nodes[name].input[0])].attr["shared_name"].s.decode() for name in readers_of(step)}
    return Counter(
        (queue.split("/")[2], reader)
        for name, reader in readers_of(step).items() if (queue := queues[name]).startswith("remote_reads/")
    )  # fmt: skip


@pytest.mark.parametrize("name, requests", [("two_lookups", 1), ("tied_head", 1), ("loop", 0)])
def test_reads_that_are_ready_at_the_same_time_share_messages(name: str, requests: int):
    captured = capture(STEPS[name](), *BATCHES[0])
    owner, other = rewritten(captured, plan(captured.step, 2, 2, {"table": 0, "head": 0}))
    assert sent(owner) == {("values", 1): 1}
    assert sent(other) == Counter({("indices", 0): requests})


def test_an_index_that_depends_on_rows_is_sent_in_a_second_request():
    captured = capture(chained_lookups(), *BATCHES[0])
    owner, other = rewritten(captured, plan(captured.step, 2, 1, {"table": 0, "other": 0}))
    assert sent(owner) == {("values", 1): 2}
    assert sent(other) == {("indices", 0): 2}


def test_the_lookups_of_all_replicas_in_one_table_are_one_tensor():
    captured = capture(two_lookups(), *BATCHES[0])
    owner, _ = rewritten(captured, plan(captured.step, 2, 3, {"table": 0, "head": 0}))
    dtypes = [one.dtypes for name, one in inboxes_of(owner.graph_def).items() if "/indices/" in name]
    assert dtypes == [(tf.int32,)]


def test_an_evaluation_without_messages_reads_at_the_owner():
    """Workers may run such a step at different times."""
    table = variable("table", ROWS, WIDTH)
    trains = capture(trained([table], lambda ids: tf.reduce_mean(tf.gather(table.value, ids))), *BATCHES[0])
    strategy = plan(trains.step, 2, 1, {"table": 1})
    captured = capture(lambda ids: tf.gather(table.value, ids), *BATCHES[0])
    reading = rewritten(captured, strategy)[0]
    assert not sent(reading)
    assert workers_of(reading) == {0, 1}
