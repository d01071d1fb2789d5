"""Element sharding of a `tf.data` pipeline: each worker maps its own elements; batches are parts of one device's."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.batch.examples import rows_to_read, share_of
from autodist.graph.python_calls import elementwise
from autodist.reading.batch_sharding import Reading, Slices, global_batch_of
from autodist.reading.element_sharding import own_elements, reading_own

REPLICAS = [0, 1, 1, 2]
"""Three workers; a batch of 10 gives them 3, 5 and 2 examples."""

ROWS = np.random.default_rng(0).normal(size=(27, 3))

Data = tf.data.Dataset


def source(shuffled: bool = True) -> Data:
    data = Data.from_tensor_slices((ROWS, np.arange(27)))
    return data.shuffle(9) if shuffled else data


def decode(row: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(row * 2, tf.float32), number


def doubled(row: Any) -> Any:
    return np.asarray(row) * 2


def augment(row: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """By a seed that comes with the element."""
    return row + tf.random.stateless_normal([3], [7, number], dtype=tf.float32), number


def by_rows(rows: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.nn.relu(rows) / 2, tf.one_hot(numbers, 27)


def as_nest(row: tf.Tensor, number: tf.Tensor) -> dict[str, Any]:
    return {"a": row, "b": (number, tf.strings.as_string(number))}


def ragged(row: tf.Tensor, number: tf.Tensor) -> tuple[Any, Any]:
    return tf.RaggedTensor.from_row_lengths(tf.range(number), [number, 0]), tf.sparse.from_dense(row)


table: list[Any] = []


def by_table(row: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    return table[-1].lookup(number)


def classed(data: Data) -> Data:
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    return TFDatasetAdapter(data, class_weight={k: k + 1.0 for k in range(27)}).get_tf_dataset()


PIPELINES: dict[str, Callable[[], Data]] = {
    "mapped": lambda: source().map(decode).batch(10),
    "in parallel": lambda: source().map(decode, num_parallel_calls=2).batch(10, num_parallel_calls=2).prefetch(1),
    "two maps": lambda: source().map(decode).prefetch(2).map(augment).batch(10),
    "without order": lambda: source(False).map(decode).batch(10),
    "the rest is dropped": lambda: source().map(decode).batch(10, drop_remainder=True),
    "repeated before": lambda: source().map(decode).repeat(3).take(70).skip(3).batch(10),
    "repeated behind": lambda: source().map(decode).batch(10).repeat(2).skip(1),
    "mapped by batch too": lambda: source().map(decode).batch(10).map(by_rows, tf.data.AUTOTUNE),
    "weighted by class": lambda: classed(source().map(decode).batch(10)),
    "fewer than replicas": lambda: source().map(decode).batch(13),
    "batches of one": lambda: source().map(decode).take(5).batch(1),
    "a nest": lambda: source().map(as_nest).batch(10),
    "one tensor": lambda: Data.range(27).shuffle(5).map(lambda n: n * n).batch(10),
    "cached before": lambda: source(False).cache().shuffle(9).map(decode).batch(10),
    "options": lambda: source().map(decode).with_options(tf.data.Options()).batch(10),
    "ragged and sparse": lambda: source().map(ragged).batch(10),
}


def leaves(batch: Any) -> list[Any]:
    found = tf.nest.flatten(batch)
    return [tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x for x in found]


def dense(value: Any) -> Any:
    return np.array(str(value.to_list())) if isinstance(value, tf.RaggedTensor) else value


ALL = {"mapped", "fewer than replicas", "batches of one"}
"""Pipelines for each worker, of which some have no example of a batch; the others are for one worker in turn."""

WORKERS = {case: range(3) if case in ALL else [k % 3] for k, case in enumerate(PIPELINES)}


@pytest.mark.parametrize("case", PIPELINES)
def test_workers_have_the_parts_of_the_batches_of_one_device(case: str) -> None:
    keras.utils.set_random_seed(1)
    dataset = PIPELINES[case]()
    expected = [leaves(batch) for _ in range(2) for batch in dataset]
    for worker in WORKERS[case]:
        keras.utils.set_random_seed(1)
        found = own_elements(PIPELINES[case](), rows_to_read(REPLICAS, worker))
        assert found.own is not None
        assert found.whole is None
        given = [(leaves(batch), examples) for _ in range(2) for batch, examples in batches_of(found.own)]
        assert len(given) == len(expected)
        for (mine, examples), all_rows in zip(given, expected, strict=True):
            assert examples == all_rows[0].shape[0]
            share = share_of(examples, REPLICAS, worker)
            start = share.start if share.size else examples - 1  # a row that does not count
            for one, other in zip(mine, all_rows, strict=True):
                np.testing.assert_array_equal(dense(one), dense(other[start : start + max(share.size, 1)]))


def batches_of(own: Any) -> Iterator[tuple[Any, int]]:
    iterator = iter(own)
    for batch in iterator:
        whole = global_batch_of(iterator)
        assert whole is not None
        yield batch, whole.examples


def test_a_worker_maps_its_own_elements_alone() -> None:
    keras.utils.set_random_seed(1)
    found = own_elements(source().map(decode).batch(10), rows_to_read(REPLICAS, 1))
    assert found.own is not None
    numbers = [n for batch, _ in batches_of(found.own) for n in batch[1].numpy().tolist()]
    assert len(numbers) == len(set(numbers)) == 5 + 5 + 4


class Decoder:
    def decode(self, row: Any) -> Any:
        return doubled(row)


@pytest.mark.parametrize(
    "function, caller",
    [
        (doubled, tf.py_function),
        (doubled, tf.numpy_function),
        (Decoder().decode, tf.py_function),
        (functools.partial(np.multiply, 2), tf.numpy_function),
    ],
)
def test_a_marked_python_function_is_called_for_own_elements_alone(
    function: Callable[..., Any], caller: Callable[..., tf.Tensor]
) -> None:
    calls: list[bytes] = []

    @elementwise
    def counting(row: Any) -> Any:
        calls.append(np.asarray(row).tobytes())
        return function(row)

    keras.utils.set_random_seed(1)
    expected = [leaves(batch) for batch in source().map(lambda row, n: (row * 2, n)).batch(10)]
    for worker, own_calls in ((0, 3 + 3 + 2), (1, 5 + 5 + 4), (2, 2 + 2 + 1)):
        calls.clear()
        keras.utils.set_random_seed(1)
        found = own_elements(source().map(python_map(counting, caller)).batch(10), rows_to_read(REPLICAS, worker))
        assert found.own is not None
        for (mine, examples), whole in zip(batches_of(found.own), expected, strict=True):
            share = share_of(examples, REPLICAS, worker)
            np.testing.assert_array_equal(mine[0], whole[0][share.start : share.start + share.size])
        assert len(set(calls)) == len(calls) == own_calls


def test_marks_of_objects_that_are_no_functions_are_refused() -> None:
    for given in (3, Decoder):
        with pytest.raises(TypeError, match="ad.elementwise got"):
            elementwise(given)  # type: ignore[arg-type]


def test_data_without_end_go_on() -> None:
    found = own_elements(source().repeat().map(decode).batch(10), rows_to_read(REPLICAS, 0))
    assert found.own is not None
    batches = batches_of(found.own)
    assert [next(batches)[1] for _ in range(9)] == [10] * 9


def test_a_lookup_table_gives_the_same_each_time() -> None:
    keys, values = tf.range(27, dtype=tf.int64), tf.range(27, dtype=tf.int64) * 3
    table.append(tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1))
    found = own_elements(source(False).map(by_table).batch(9), rows_to_read(REPLICAS, 0))
    assert found.own is not None
    assert next(batches_of(found.own))[0].numpy().tolist() == [0, 3, 6]


def draws(row: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return row + tf.random.normal([3], dtype=row.dtype), number


def in_python(row: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(doubled, [row], row.dtype)


def python_map(function: Callable[..., Any], caller: Callable[..., tf.Tensor]) -> Callable[..., Any]:
    """A map that calls a function of one row by Python."""

    def by_python(row: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ensure_shape(caller(function, [row], row.dtype), row.shape), number

    return by_python


def whole_mean(rows: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return rows - tf.reduce_mean(rows, 0)


def more_rows(rows: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return tf.reshape(rows, [-1])


def open_order() -> Data:
    options = tf.data.Options()
    options.deterministic = False
    return source().map(decode).batch(10).with_options(options)


READ_WHOLE = {
    "draws": (lambda: source().map(decode).map(draws).batch(10), r"draws \(.*py:\d+\).*RandomStandardNormal"),
    "python": (
        lambda: source().map(in_python).batch(10),
        r"in_python.*PyFunc calls Python code, doubled.*ad.elementwise\(doubled\) in the call of tf.numpy_function",
    ),
    "python, eagerly": (
        lambda: source().map(python_map(doubled, tf.py_function)).batch(10),
        r"EagerPyFunc calls Python code, doubled.*ad.elementwise\(doubled\) in the call of tf.py_function",
    ),
    "python behind the batch": (
        lambda: source().batch(10).map(python_map(elementwise(doubled), tf.py_function)), r"takes complete batches"
    ),
    "shuffled behind": (lambda: source().map(decode).shuffle(3).batch(10), r"decode.*Shuffle.*comes after it"),
    "padded": (lambda: source().map(decode).padded_batch(10), r"decode.*PaddedBatch comes after it"),
    "open order": (open_order, r"decode.*deterministic=False"),
    "in a parallel map": (
        lambda: source().map(decode, 2, deterministic=False).batch(10), r"decode.*deterministic=False"
    ),
    "sees the whole batch": (
        lambda: source().map(decode).batch(10).map(whole_mean),
        r"whole_mean.*more than one example",
    ),
    "gives more rows": (lambda: source().map(decode).batch(10).map(more_rows), r"more_rows.*more than one example"),
    "of a fixed length": (
        lambda: source().map(decode).batch(10, drop_remainder=True).map(by_rows), r"by_rows.*a fixed length"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ_WHOLE)
def test_maps_that_cannot_be_sharded_are_logged_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, told = READ_WHOLE[case]
    with caplog.at_level(logging.INFO, "autodist"):
        for _ in range(2):
            assert reading_own(make(), Reading(rows_to_read(REPLICAS, 0), 3, Slices(lambda n: (0, n)))) is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert "computed for all examples by each of 3 workers, which takes 3 times one device's processor time" in message
    assert re.search(told, message), message


def test_a_map_before_the_shuffle_is_told_though_one_behind_it_is_spared() -> None:
    found = own_elements(source(False).map(decode).shuffle(9).map(augment).batch(10), rows_to_read(REPLICAS, 0))
    assert found.own is not None
    assert found.whole is not None
    assert found.whole.map.startswith("decode (")


def test_nothing_is_told_where_there_is_no_map() -> None:
    found = own_elements(source().batch(10), rows_to_read(REPLICAS, 0))
    assert (found.own, found.whole) == (None, None)
    assert own_elements([1, 2], rows_to_read(REPLICAS, 0)).own is None


def test_workers_can_tell_whether_they_read_the_same() -> None:
    def told(rows: Any, worker: int) -> Any:
        found = own_elements(
            Data.from_tensor_slices(rows).map(lambda x: x + 1).batch(10), rows_to_read(REPLICAS, worker)
        )
        assert found.own is not None
        iterator = iter(found.own)
        next(iterator)
        whole = global_batch_of(iterator)
        assert whole is not None
        return int(dict(whole.alike)["the order of examples"])

    assert told(ROWS, 0) == told(ROWS, 2)
    assert told(ROWS, 0) != told(ROWS + 1, 2)
    assert told(ROWS, 0) != told(ROWS[::-1].copy(), 0)
