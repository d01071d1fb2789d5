import gc
import time
import weakref
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.reading.data_sets import has_one_order, in_one_order, quick_read

Pair = namedtuple("Pair", ["images", "labels"])
X = np.arange(10, dtype=np.float32).reshape(5, 2)
Y = np.arange(5)


@pytest.mark.parametrize(
    "elements",
    [
        X,
        (X, Y),
        ({"z": X, "a": (Y, X + 1)}, Y + 1),
        Pair(X, Y),
        (Pair(X, {"b": Y, "a": X}), Y),
    ],
    ids=["tensor", "tuple", "dictionaries", "namedtuple", "nested namedtuple"],
)
def test_reads_what_next_gives(elements: Any) -> None:
    batches = tf.data.Dataset.from_tensor_slices(elements).batch(2)
    iterator = iter(batches)
    read = quick_read(iterator)
    assert read is not None
    for expected in batches:
        found = read()
        tf.nest.assert_same_structure(found, expected)
        assert type(found) is type(expected)
        for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    for _ in range(2):
        with pytest.raises(StopIteration):
            read()


def test_the_iterator_goes_on_where_the_read_left_it() -> None:
    iterator = iter(tf.data.Dataset.range(4))
    read = quick_read(iterator)
    assert read is not None
    assert [int(one) for one in (read(), next(iterator), read(), next(iterator))] == [0, 1, 2, 3]


def test_an_element_that_fails_raises_what_next_does_and_those_after_it_can_be_read() -> None:
    def checked(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(
            [tf.debugging.assert_none_equal(x, tf.constant(1, tf.int64), message="it is one")]
        ):
            return tf.identity(x)

    iterator = iter(tf.data.Dataset.range(3).map(checked))
    read = quick_read(iterator)
    assert read is not None
    assert int(read()) == 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="it is one"):
        read()
    assert int(read()) == 2


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])),
        tf.data.Dataset.from_tensor_slices((X, tf.sparse.from_dense(X))),
        tf.data.Dataset.from_tensors((X, None)),
        tf.data.Dataset.from_tensors(tf.experimental.Optional.from_value(1)),
    ],
    ids=["ragged", "sparse", "none", "optional"],
)
def test_elements_that_are_no_tensors_are_read_by_next(dataset: tf.data.Dataset) -> None:
    assert quick_read(iter(dataset)) is None


def test_other_iterators_are_read_by_next() -> None:
    assert quick_read(iter([X])) is None


def test_asynchronous_execution_is_left_to_next() -> None:
    iterator = iter(tf.data.Dataset.range(1))
    tf.config.experimental.set_synchronous_execution(False)
    try:
        assert quick_read(iterator) is None
    finally:
        tf.config.experimental.set_synchronous_execution(True)


def test_it_does_not_keep_the_iterator() -> None:
    iterator = iter(tf.data.Dataset.range(1))
    read, kept = quick_read(iterator), weakref.ref(iterator)
    del iterator
    gc.collect()
    assert read is not None
    assert kept() is None


def later_ones_first(number: tf.Tensor) -> tf.Tensor:
    def wait(given: tf.Tensor) -> tf.Tensor:
        time.sleep(0.02 * (3 - int(given)))
        return given

    return tf.py_function(wait, [number], tf.int64)


def in_any_order() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    return options


NUMBERS = tf.data.Dataset.range(4)


@pytest.mark.parametrize(
    "dataset",
    [
        NUMBERS.map(later_ones_first, 4, deterministic=False),
        NUMBERS.map(later_ones_first, 4).with_options(in_any_order()),
        NUMBERS.interleave(
            lambda n: tf.data.Dataset.from_tensors(n).map(later_ones_first),
            4,
            num_parallel_calls=4,
            deterministic=False,
        ).prefetch(1),
    ],
    ids=["map", "option", "interleave"],
)
def test_all_workers_read_in_one_order(dataset: tf.data.Dataset) -> None:
    assert not has_one_order(dataset)
    assert list(in_one_order(dataset).as_numpy_iterator()) == [0, 1, 2, 3]
    assert in_one_order(dataset).cardinality() == dataset.cardinality()


def test_data_in_one_order_is_left_as_it_is() -> None:
    for data in (NUMBERS.map(lambda n: n + 1, 4).shuffle(4).batch(2), [1, 2]):
        assert in_one_order(data) is data
