"""Which rows of what is fed are a worker's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import EmptyBatchError, UnevenBatchError
from autodist.resources import ResourceSpec
from autodist.sessions.feeds import SessionFeeds

v1 = tf.compat.v1
ROWS = np.arange(10.0)


def feeds(worker, batch=None, cpus=((0, 1), (0,))):
    nodes = [{"address": f"10.0.0.{k}", "cpus": list(c), "chief": k == 0} for k, c in enumerate(cpus)]
    spec = {"nodes": nodes} | ({"batch": batch} if batch else {})
    return SessionFeeds(ResourceSpec.from_dict(spec), worker, {}, frozenset())


@pytest.fixture
def tensors():
    """A placeholder of a batch, one of a number, and a batch that an iterator gives."""
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_tensor_slices(ROWS).batch(10)
        got = v1.data.make_one_shot_iterator(dataset).get_next()
        yield v1.placeholder(tf.float64, [None]), v1.placeholder(tf.float64, []), got


@pytest.mark.parametrize("batch, own", [("global", [slice(0, 7), slice(7, 10)]), ("per_worker", None), (None, None)])
def test_fed_batches_are_the_workers_own_unless_the_yaml_says_global(tensors, batch, own):
    x, number, _ = tensors
    for worker in range(2):
        rows, rate = feeds(worker, batch).own_part({x: ROWS, number: np.array(0.1)}, [0, None])
        np.testing.assert_array_equal(rows, ROWS[own[worker]] if own else ROWS)
        assert rate == 0.1


@pytest.mark.parametrize("batch, own", [(None, [slice(0, 7), slice(7, 10)]), ("per_worker", None)])
def test_batches_of_iterators_are_global_unless_the_yaml_says_otherwise(tensors, batch, own):
    for worker in range(2):
        (rows,) = feeds(worker, batch).own_part({tensors[2]: ROWS}, [0])
        np.testing.assert_array_equal(rows, ROWS[own[worker]] if own else ROWS)


def test_a_worker_that_gets_no_example_of_a_global_batch_has_no_rows(tensors):
    (rows,) = feeds(1, "global", ((0, 1), (0,))).own_part({tensors[0]: ROWS[:2]}, [0])
    assert rows.shape == (0,)


def test_global_batches_that_disagree_are_refused(tensors):
    x, _, got = tensors
    with pytest.raises(UnevenBatchError, match="has 10, .* has 4"):
        feeds(0, "global").own_part({got: ROWS, x: ROWS[:4]}, [0, 0])


def test_a_global_batch_is_dealt_out_among_all_replicas(tensors):
    x, _, got = tensors
    assert feeds(1).dealt({x: ROWS}, [0]).shares == 1
    assert feeds(1, "global").dealt({x: ROWS}, [0]).shares == 3
    assert feeds(1).dealt({got: ROWS}, [0]).shares == 3
    assert feeds(1).dealt({got: ROWS}, [None]).shares == 1


def test_a_run_that_no_other_worker_has_a_part_in_takes_the_whole_of_a_global_batch(tensors):
    (rows,) = feeds(1, "global").own_part({tensors[0]: ROWS}, [0], is_alone=True)
    np.testing.assert_array_equal(rows, ROWS)


def test_a_global_batch_without_examples_is_refused(tensors):
    with pytest.raises(EmptyBatchError, match="no examples at all"):
        feeds(0, "global").own_part({tensors[0]: ROWS[:0]}, [0])
