"""Bytes between workers: for an embedding, rows are sent and never the table."""

from __future__ import annotations

from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.kernels.in_one_process import Session, capture, plan
from tests.unit.kernels.in_one_session import readers_of
from tests.unit.kernels.table_steps import WIDTH, table_step
from tests.unit.kernels.traffic import bytes_sent

ROWS = 10_000
ROW = 8 * WIDTH
TABLE = ROWS * ROW
ID = 4

PLANS = {"by server": {"table": 1}, "by all-reduce": None}
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1), "adagrad": lambda: keras.optimizers.Adagrad(0.1)}


def different_ids(count):
    """`count` examples of two ids that are all different."""
    return np.random.default_rng(0).permutation(ROWS)[: 2 * count].reshape(count, 2).astype(np.int32)


@cache
def session_of(planned, optimizer="sgd", gather=tf.gather, is_global=True):
    captured, _ = table_step(OPTIMIZERS[optimizer](), gather, ROWS, is_global)
    return Session(captured, plan(captured.step, 2, 1, PLANS[planned]))


def total(ids, planned, *arguments, **named):
    return sum(bytes_sent(session_of(planned, *arguments, **named), (ids,)).values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("planned", PLANS)
def test_bytes_are_in_proportion_to_the_ids(planned, optimizer):
    few, many = (total(different_ids(n), planned, optimizer) for n in (8, 80))
    assert many < TABLE / 10
    constant = many - 10 * few  # bytes independent of the ids: losses, learning rates, completion signals
    assert abs(constant) < 10 * 200


@pytest.mark.parametrize("planned", PLANS)
def test_the_number_of_fed_examples_needs_no_message_of_its_own(planned):
    """All workers know the length of a global batch; the lengths of separate feeds are reduced with the loss."""
    assert messages(planned, is_global=False) == messages(planned, is_global=True)
    counted, known = (total(different_ids(8), planned, is_global=is_global) for is_global in (False, True))
    assert 0 < counted - known <= 64 * messages(planned, is_global=True)


def messages(planned, is_global):
    """The number of messages in which workers send tensors to each other."""
    items = session_of(planned, is_global=is_global).steps
    return sum(reader != worker for worker, item in enumerate(items) for reader in readers_of(item).values())


def test_a_worker_without_the_table_fetches_rows_and_sends_rows():
    """With 20 ids on each worker: the other one's go to the owner, their rows come, their gradients go."""
    found = total(different_ids(20), "by server")
    asked = 20
    rows = asked * (ID + ROW + ID + ROW)
    assert rows <= found < rows + 200


def test_each_worker_gets_the_rows_of_the_other_by_all_reduce():
    found = total(different_ids(20), "by all-reduce")
    rows = 2 * 20 * (ID + ROW)
    assert rows <= found < rows + 200


@pytest.mark.parametrize("planned", PLANS)
def test_a_row_that_repeats_is_sent_once(planned):
    ids = np.zeros((40, 2), np.int32)
    repeated, different = total(ids, planned), total(different_ids(40), planned)
    travelling = (1 if PLANS[planned] else 2) * 40 * (ID + ROW)
    assert different - repeated == pytest.approx(travelling, abs=2 * (ID + ROW))


def test_few_repeated_rows_are_sent_as_they_are():
    """To sum them would take a worker longer than to send them."""
    repeated = different_ids(40)
    repeated[:4, 1] = repeated[:4, 0]  # 4 of the 40 ids of the first worker
    assert total(repeated, "by all-reduce") == total(different_ids(40), "by all-reduce")


def test_rows_are_sent_one_by_one_where_the_update_squares_each():
    ids = np.zeros((40, 2), np.int32)
    assert total(ids, "by all-reduce", "adagrad") == total(different_ids(40), "by all-reduce", "adagrad")


def test_a_table_that_is_cast_before_rows_are_gathered_stays_where_it_is():
    """As Keras's Embedding does it in mixed precision."""

    def gather(table, ids):
        return tf.cast(tf.gather(tf.cast(table, tf.float32), ids), tf.float64)

    assert total(different_ids(20), "by server", gather=gather) < TABLE / 10


def test_a_dense_variable_travels_whole():
    """Checks that the count includes all sent bytes; otherwise the tests above would prove nothing."""
    kernel = tf.Variable(np.ones((100, 7)), name="kernel")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ kernel))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    captured = capture(step, np.zeros((4, 100)), is_global=True)
    found = bytes_sent(Session(captured, plan(captured.step, 2, 1, {"kernel": 1})), (np.ones((4, 100)),))
    whole = 100 * 7 * 8
    largest = sorted(found.values(), reverse=True)[:2]  # the gradient goes, the value comes
    assert largest[1] == whole and whole <= largest[0] < whole + 100  # a bucket is padded
    assert 2 * whole <= sum(found.values()) < 2 * whole + 200
