"""A session whose graph reads its batches from iterators of its own."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import CaptureError, UnevenBatchError
from autodist.runs.run import Run

v1 = tf.compat.v1
X = np.arange(22.0).reshape(11, 2) / 22
Y = X.sum(axis=1)


def autodist(replicas=2, workers=1):
    node = {"address": "localhost", "cpus": list(range(replicas * workers)), "workers": workers}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


@contextmanager
def session_of(ad):
    """Returns a graph, and a function that makes its session: AutoDist's, or TensorFlow's own without one."""
    with tf.Graph().as_default():
        if ad is None:
            yield v1.Session
        else:
            with ad.scope():
                yield ad.create_distributed_session


def data(size=4, **batch):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size, **batch)


def model(x, y):
    weight = v1.get_variable("weight", [2, 1], tf.float64, v1.ones_initializer())
    loss = tf.reduce_mean(tf.square(tf.squeeze(x @ weight, 1) - 2 * y))
    return weight, loss, v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)


def until_the_end(session, fetches, feeds=None):
    found = []
    while True:
        try:
            found.append(session.run(fetches, feeds))
        except tf.errors.OutOfRangeError:
            return found


def trained_from_initializable(ad):
    with session_of(ad) as make_session:
        fed = v1.placeholder(tf.float64, [None, 2]), v1.placeholder(tf.float64, Y.shape)
        iterator = v1.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(fed).batch(4))
        weight, loss, train = model(*iterator.get_next())
        session = make_session()
        session.run(v1.global_variables_initializer())
        losses = []
        for _ in range(2):
            session.run(iterator.initializer, dict(zip(fed, (X, Y), strict=True)))
            losses += [loss for loss, _ in until_the_end(session, [loss, train])]
        return [*losses, *session.run(weight).ravel()]


def trained_from_one_shot(ad):
    with session_of(ad) as make_session:
        iterators = [v1.data.make_one_shot_iterator(d) for d in (data(), data(3))]
        handle = v1.placeholder(tf.string, [])
        types, shapes = v1.data.get_output_types(data()), v1.data.get_output_shapes(data())
        weight, loss, train = model(*v1.data.Iterator.from_string_handle(handle, types, shapes).get_next())
        session = make_session()
        session.run(v1.global_variables_initializer())
        first, second = ({handle: session.run(iterator.string_handle())} for iterator in iterators)
        losses = [session.run([loss, train], first)[0], session.run(loss, second)]
        for feed in (first, second):
            losses += [value for value, _ in until_the_end(session, [loss, train], feed)]
        return [*losses, *session.run(weight).ravel()]


@pytest.mark.feature("session", "data: iterators that the step itself reads")
@pytest.mark.parametrize(
    "train, replicas", [(trained_from_initializable, 3), (trained_from_one_shot, 1), (trained_from_one_shot, 2)]
)
def test_an_iterator_gives_the_replicas_what_it_gives_one_device(train, replicas):
    np.testing.assert_allclose(train(autodist(replicas)), train(None), rtol=1e-12)


def test_each_run_takes_one_element_however_it_is_read():
    with session_of(autodist()) as make_session:
        x, y = v1.data.make_one_shot_iterator(data(2)).get_next()
        weight, _, train = model(x, y)
        with tf.control_dependencies([y.op]):
            after = tf.constant(1)
        session = make_session()
        session.run(v1.global_variables_initializer())
        np.testing.assert_array_equal(session.run(x), X[:2])
        assert session.run([after, x.op]) == [1, None]
        np.testing.assert_array_equal(session.run([y, train, x])[0], Y[4:6])
        np.testing.assert_array_equal(session.run([x, y.op])[0], X[6:8])
        assert session.run({"after": after}) == {"after": 1}
        np.testing.assert_array_equal(session.run([y, weight])[0], Y[10:])


def test_elements_of_an_iterator_can_be_fed_instead():
    with session_of(autodist()) as make_session:
        x, y = v1.data.make_one_shot_iterator(data(2)).get_next()
        _, loss, train = model(x, y)
        session = make_session()
        session.run(v1.global_variables_initializer())
        assert session.run([loss, train], {x: X, y: Y})[0] == pytest.approx(np.mean(Y**2))
        np.testing.assert_array_equal(session.run(y, {x: X[:2]}), Y[:2])
        np.testing.assert_array_equal(session.run([x, y], {y: Y[9:]})[1], Y[9:])
        np.testing.assert_array_equal(session.run(x), X[4:6])


@pytest.mark.feature("session", "data: inputs with different numbers of rows", refused="UnevenBatchError")
def test_parts_of_an_element_that_disagree_in_length_are_refused():
    with session_of(autodist()) as make_session:
        dataset = tf.data.Dataset.from_tensors((X, Y, np.arange(3))).repeat()
        x, y, more = v1.data.make_one_shot_iterator(dataset).get_next()
        _, loss, train = model(x, y)
        session = make_session()
        session.run(v1.global_variables_initializer())
        with pytest.raises(UnevenBatchError, match=r"IteratorGetNext:0 has 11.*IteratorGetNext:2 has 3.*batch_axis"):
            session.run([train, loss, tf.reduce_sum(more)])


@pytest.fixture
def no_start(monkeypatch):
    def start(run):
        raise AssertionError("a run is about to start")

    monkeypatch.setattr(Run, "start", start)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_graph_made_for_one_length_is_refused_before_any_process_is_started(no_start, shape):
    with session_of(autodist(*shape)) as make_session:
        model(*v1.data.make_one_shot_iterator(data(drop_remainder=True)).get_next())
        with pytest.raises(CaptureError, match=r"takes 4 examples at a time.*no drop_remainder=True"):
            make_session()


def test_a_dataset_that_every_worker_would_shuffle_otherwise_is_refused_before_any_process_is_started(no_start):
    with tf.Graph().as_default():
        element = v1.data.make_one_shot_iterator(data().shuffle(3)).get_next()
        with (ad := autodist(1, 2)).scope():
            model(*element)
            with pytest.raises(CaptureError, match="shuffles by a seed that every worker draws for itself"):
                ad.create_distributed_session()


@pytest.mark.feature("session", "data: queues", refused="CaptureError")
@pytest.mark.parametrize("shape", [(2, 1), (1, 1)])
def test_a_queue_is_refused(shape):
    with session_of(autodist(*shape)) as make_session:
        queue = tf.queue.FIFOQueue(10, [tf.float64, tf.float64], [[2], []])
        _, _, train = model(*queue.dequeue_many(2))
        session = make_session()
        with pytest.raises(CaptureError, match=r"from a queue .*DequeueMany.*get_next\(\)"):
            session.run(train)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (1, 1)])
def test_a_queue_that_threads_are_to_fill_is_refused_before_they_start(no_start, shape):
    """A thread would wait for room in its own run's queue, and the training for elements in another."""
    with session_of(autodist(*shape)) as make_session:
        model(*v1.train.batch([tf.constant([1.0, 2.0], tf.float64), tf.constant(1.0, tf.float64)], 2))
        with pytest.raises(CaptureError, match="runs do not share queues"):
            make_session()
