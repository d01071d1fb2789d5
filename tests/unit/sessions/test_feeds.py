"""The rows of a feed that belong to each worker."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.errors import CaptureError, EmptyBatchError, UnevenBatchError
from autodist.resources import ResourceSpec
from autodist.sessions.feeds import SessionFeeds
from autodist.sessions.runs import SessionRuns

v1 = tf.compat.v1
ROWS = np.arange(10.0)


def feeds(worker, batch=None, cpus=((0, 1), (0,))):
    nodes = [{"address": f"10.0.0.{k}", "cpus": list(c), "chief": k == 0} for k, c in enumerate(cpus)]
    spec = {"nodes": nodes} | ({"batch": batch} if batch else {})
    return SessionFeeds(ResourceSpec.from_dict(spec), worker, {}, frozenset())


@pytest.fixture
def tensors():
    """Returns a placeholder of a batch, one of a number, and a batch from an iterator."""
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_tensor_slices(ROWS).batch(10)
        got = v1.data.make_one_shot_iterator(dataset).get_next()
        yield v1.placeholder(tf.float64, [None]), v1.placeholder(tf.float64, []), got


@pytest.mark.parametrize("batch, own", [("global", [slice(0, 7), slice(7, 10)]), ("per_worker", None), (None, None)])
def test_fed_batches_are_the_workers_own_unless_the_yaml_says_global(tensors, batch, own):
    x, number, _ = tensors
    for worker in range(2):
        rows, rate = feeds(worker, batch).own_part({x: ROWS, number: np.array(0.1)}, [0, None]).values()
        np.testing.assert_array_equal(rows, ROWS[own[worker]] if own else ROWS)
        assert rate == 0.1


@pytest.mark.parametrize("batch, own", [(None, [slice(0, 7), slice(7, 10)]), ("per_worker", None)])
def test_batches_of_iterators_are_global_unless_the_yaml_says_otherwise(tensors, batch, own):
    for worker in range(2):
        (rows,) = feeds(worker, batch).own_part({tensors[2]: ROWS}, [0]).values()
        np.testing.assert_array_equal(rows, ROWS[own[worker]] if own else ROWS)


def test_a_worker_that_gets_no_example_of_a_global_batch_has_no_rows(tensors):
    (rows,) = feeds(1, "global", ((0, 1), (0,))).own_part({tensors[0]: ROWS[:2]}, [0]).values()
    assert rows.shape == (0,)


def test_global_batches_that_disagree_are_refused(tensors):
    x, _, got = tensors
    with pytest.raises(UnevenBatchError, match="has 10, .* has 4"):
        feeds(0, "global").own_part({got: ROWS, x: ROWS[:4]}, [0, 0]).values()


def test_a_global_batch_is_dealt_out_among_all_replicas(tensors):
    x, _, got = tensors
    assert feeds(1).division({x: ROWS}, [0]).shares == 1
    assert feeds(1, "global").division({x: ROWS}, [0]).shares == 3
    assert feeds(1).division({got: ROWS}, [0]).shares == 3
    assert feeds(1).division({got: ROWS}, [None]).shares == 1


def test_a_run_that_no_other_worker_has_a_part_in_takes_the_whole_of_a_global_batch(tensors):
    (rows,) = feeds(1, "global").own_part({tensors[0]: ROWS}, [0], is_local=True).values()
    np.testing.assert_array_equal(rows, ROWS)


ONE_EACH = ((0,), (0,))


@pytest.mark.parametrize(
    "shapes, named, options, axes",
    [
        ([[6], [6, 4]], {}, {}, [0, 0]),
        ([[6], [6, 4], [1]], {}, {}, [0, 0, None]),
        ([[6], [6, 4]], {"b:0": None}, {}, [0, None]),
        ([[6], [2, 6]], {"b:0": 1}, {}, [0, 1]),
        ([[6], [3, 4]], {}, {}, [None, None]),  # one of them may be the same for all
        ([[None], [6, 4]], {}, {}, [0, None]),
        ([None, [6, 4]], {}, {}, [0, 0]),  # of any shape, as rates are
        ([[6], [6, 4]], {}, {"batch": "global"}, [None, None]),
        ([[6], [6, 4]], {}, {"cpus": ((0,),)}, [None, None]),
        ([[6], [6, 4]], {}, {"cpus": ((0,),), "even_alone": True}, [0, 0]),
    ],
)
def test_fixed_shapes_of_one_length_hold_a_row_for_each_example_of_a_worker(shapes, named, options, axes):
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        read = [v1.placeholder(tf.float64, shape, name) for shape, name in zip(shapes, "abc", strict=False)]
        v1.placeholder(tf.float64, [7], "unread")
        weight = v1.get_variable("weight", [], tf.float64)
        loss = tf.add_n([tf.reduce_mean(tf.square(weight * x)) for x in read])
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        captured = CapturedGraph.of(graph, notes.calls)
    even_alone = options.get("even_alone", False)
    given = {"cpus": ONE_EACH} | {name: value for name, value in options.items() if name != "even_alone"}
    mine = replace(feeds(0, **given), batch_axis=named).with_rows(captured.whole(), captured, even_alone)
    arrays = {t: np.zeros([n or 6 for n in shape or [6]]) for t, shape in zip(read, shapes, strict=True)}
    assert mine.axes_of(arrays, lambda: captured.step([], [], dict.fromkeys((t.name for t in read), None))) == axes
    split = [(t, axis) for t, axis in zip(read, axes, strict=True) if axis is not None]
    is_fixed = any(t.shape.rank and t.shape[axis] for t, axis in split)
    assert mine.fixed_rows(arrays, axes) == (6 if is_fixed else None)


@pytest.mark.parametrize(
    ("others", "named", "asked"),
    [
        (1, {}, 2),  # rejected, and compared again if the script continues
        (0, {}, 1),
        (1, {"table:0": None}, 0),
    ],
)
@pytest.mark.parametrize("own", [0, 1])
def test_fixed_shapes_beside_open_ones_are_the_same_on_all_workers_or_refused(others, named, asked, own):
    mine = replace(feeds(own, cpus=((0,), (0,), ())), batch_axis=named)
    told = []

    def reduce(digests, how):
        assert how == "max"
        told.append(digests)
        return np.maximum(digests, np.array([others, -others])) if others else digests

    run = SimpleNamespace(workers=3, index=own, spec=mine.spec, coordination=SimpleNamespace(reduce=reduce))
    runs = SessionRuns(run, mine)
    with tf.Graph().as_default():
        table, rate = v1.placeholder(tf.float64, [3], "table"), v1.placeholder(tf.float64, [], "rate")
        arrays = {table: np.zeros(3), rate: np.array(0.1)}
    refused = pytest.raises(CaptureError, match=r"table:0 \(3,\)\. .*batch_axis={'table': 0}")
    for _ in range(2):
        with refused if asked == 2 else nullcontext():
            runs._require_whole_alike(arrays, [None, None])
    assert len(told) == asked


def test_a_global_batch_without_examples_is_refused(tensors):
    with pytest.raises(EmptyBatchError, match="no examples at all"):
        feeds(0, "global").own_part({tensors[0]: ROWS[:0]}, [0]).values()
