from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.session_resources import elements_read, fed_to_iterators, require_alike
from autodist.errors import CaptureError

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def pairs(**shuffle):
    return tf.data.Dataset.from_tensor_slices((np.arange(6.0), np.arange(6))).shuffle(6, **shuffle).batch(2)


def names(tensors):
    return [t.name for t in tensors]


def test_resources_of_a_run_are_found_by_data_inputs_control_inputs_and_the_operation():
    x, y = v1.data.make_one_shot_iterator(pairs()).get_next()
    other = v1.data.make_one_shot_iterator(pairs()).get_next()
    with tf.control_dependencies([other[1].op]):
        after = tf.constant(1)
    assert names(elements_read([tf.reduce_sum(y)], ())) == [y.name]
    assert names(elements_read([tf.cast(x, tf.int64) + y, after], ())) == [x.name, y.name, other[0].name]
    assert names(elements_read([y.op], ())) == [x.name]
    assert elements_read([tf.constant(1)], ()) == []


def test_a_fed_resource_is_not_read():
    x, y = v1.data.make_one_shot_iterator(pairs()).get_next()
    between = x * 2
    assert elements_read([x + 1], {x.name}) == []
    assert names(elements_read([tf.cast(between, tf.int64) + y], {between.name})) == [y.name]


def test_loops_and_long_chains_are_followed():
    x, _ = v1.data.make_one_shot_iterator(pairs()).get_next()
    end = tf.while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, a + tf.reduce_sum(x)), [0, tf.reduce_sum(x)])[1]
    for _ in range(3000):
        end = end + 1
    assert names(elements_read([end], ())) == [x.name]


def test_the_handle_of_a_feedable_iterator_is_what_getting_its_elements_takes():
    dataset = pairs()
    handle, unused = v1.placeholder(tf.string, []), v1.placeholder(tf.float32, [])
    types, shapes = v1.data.get_output_types(dataset), v1.data.get_output_shapes(dataset)
    elements = v1.data.Iterator.from_string_handle(handle, types, shapes).get_next()
    assert fed_to_iterators(elements, {handle.name, unused.name}) == {handle.name}


def test_elements_that_cannot_be_cut_are_refused():
    sparse = tf.data.Dataset.from_tensors(tf.sparse.from_dense([[1, 0], [0, 2]]))
    element = v1.data.make_one_shot_iterator(sparse).get_next()
    with pytest.raises(CaptureError, match=r"IteratorGetNext has sparse or ragged tensors.*distribute_dataset"):
        elements_read([element.values], ())


@pytest.mark.parametrize("make", [v1.data.make_initializable_iterator, v1.data.make_one_shot_iterator])
def test_a_shuffle_by_a_seed_of_each_process_is_refused(graph, make):
    make(pairs()).get_next()
    with pytest.raises(CaptureError, match=r"ShuffleDataset shuffles by a seed that every worker draws.*the scope"):
        require_alike(graph.as_graph_def())


@pytest.mark.parametrize("make", [v1.data.make_initializable_iterator, v1.data.make_one_shot_iterator])
@pytest.mark.parametrize("for_all, own", [(None, 1), (None, 0), (3, None), (0, None), (3, 4)])
def test_a_shuffle_by_any_other_seed_passes(graph, make, for_all, own):
    v1.set_random_seed(for_all)
    make(pairs(seed=own)).get_next()
    require_alike(graph.as_graph_def())
