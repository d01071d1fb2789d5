"""Sparse and ragged arguments are split by their examples, and train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.batch.composite_rows import open_spec, rows_of
from autodist.errors import CaptureError

SPARSE = tf.SparseTensor([[2, 0], [0, 1], [0, 3]], [3.0, 4.0, 5.0], [4, 5])
RAGGED = tf.RaggedTensor.from_row_lengths([3.0, 4.0, 5.0], [0, 2, 0, 1])
CUBE = tf.SparseTensor([[1, 0, 1], [1, 2, 0]], [7, 8], [2, 3, 4])
WORDS = tf.ragged.constant([["a", "bc"], [], ["d"]])
MATRICES = tf.RaggedTensor.from_row_lengths(np.arange(6.0).reshape(3, 2), [1, 0, 2])


def replicas(count: int) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(count))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


def examples(value: Any) -> list[Any]:
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(tf.sparse.reorder(value))
    listed: list[Any] = value.numpy().tolist() if isinstance(value, tf.Tensor) else value.to_list()
    return listed


class Graphs(tf.experimental.BatchableExtensionType):
    """A library's composite tensor."""

    nodes: tf.Tensor


@pytest.mark.parametrize(
    "value", [SPARSE, RAGGED, CUBE, WORDS, MATRICES], ids=["sparse", "ragged", "rank 3", "words", "matrices"]
)
def test_decomposed_values_are_composed_again(value: Any) -> None:
    rows = rows_of(value, 0, "x of step")
    arrays = rows.arrays(value)
    assert len(arrays) == rows.arrays_per_tensor and {len(a) for a in arrays} == {len(examples(value))}
    assert all(open_spec(a).shape[:2].as_list() == [None, None] for a in arrays)
    made = rows.tensor(*map(tf.constant, arrays))
    assert type(made) is type(value) and made.dtype == value.dtype
    assert examples(made) == examples(value)
    last = rows.tensor(*(tf.constant(a[1:]) for a in arrays))  # another replica's part
    assert examples(last) == examples(value)[1:]


@pytest.mark.feature("function", "data: ragged tensors with several ragged axes", refused="CaptureError")
@pytest.mark.feature("function", "data: `IndexedSlices` as inputs", refused="CaptureError")
@pytest.mark.parametrize(
    "value, axis, told",
    [
        (tf.ragged.constant([[[1], [2, 3]]]), 0, "RaggedTensor of 2 ragged axes.*to_tensor.*batch_axis"),
        (tf.SparseTensor([[1]], [1.0], [3]), 0, "SparseTensor of rank 1.*tf.sparse.to_dense.*batch_axis"),
        (SPARSE, 1, "SparseTensor, which is split along its first axis alone, and its batch axis is set to 1"),
        (tf.IndexedSlices(tf.ones(1), tf.constant([0])), 0, "IndexedSlices.*convert_to_tensor.*batch_axis"),
        (
            Graphs(tf.ones([2, 3])),
            0,
            "Graphs, which is not split.*its tensors as separate.*batch_axis",
        ),
    ],
)
def test_values_without_a_row_for_each_example_are_refused(value: Any, axis: int, told: str) -> None:
    ad = replicas(2)
    with ad.scope():
        step = ad.function(lambda x: tf.constant(0.0), batch_axis={"x": axis})
        with pytest.raises(CaptureError, match=f"x of <lambda> is a {told}"):
            step(value)


def test_every_replica_gets_the_whole_of_a_librarys_composite() -> None:
    ad = replicas(2)
    with ad.scope():
        step = ad.function(lambda x: tf.reduce_sum(x.nodes), batch_axis={"x": None})
        assert [float(step(Graphs(k * tf.ones([2, 3])))) for k in (1.0, 2.0)] == [6.0, 12.0]


@pytest.mark.feature("function", "data: sparse tensors")
def test_batches_with_other_numbers_of_entries_are_not_traced_again() -> None:
    ad = replicas(2)
    with ad.scope():

        @ad.function
        def step(x: tf.SparseTensor) -> tf.Tensor:
            return tf.reduce_sum(x.values)

        values = [SPARSE, tf.sparse.from_dense(tf.ones([4, 5])), tf.sparse.from_dense(tf.zeros([3, 5]))]
        assert [float(step(x)) for x in values] == [12, 20, 0]
        assert step.traces == 1
        step(tf.sparse.from_dense(tf.ones([4, 6])))  # more columns: another step, as for tf.function
        assert step.traces == 2


def matrices() -> Any:
    return scipy.sparse.random(13, 8, 0.3, random_state=1, format="csr")


def sparse_tensors() -> tf.data.Dataset:
    x = tf.sparse.from_dense(matrices().toarray())
    y = np.arange(26.0).reshape(13, 2)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(5)


@pytest.mark.feature("fit", "data: sparse tensors")
@pytest.mark.feature("fit", "data: SciPy's sparse matrices")
@pytest.mark.parametrize("kind", ["scipy", "tf.sparse"])
@pytest.mark.usefixtures("keras_in_float64")
def test_fit_takes_sparse_matrices_as_on_one_device(kind: str) -> None:
    """13 examples in batches of 5 on two replicas: no part is as long as another."""

    def fit() -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,), sparse=True), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        if kind == "scipy":
            model.fit(matrices(), np.arange(26.0).reshape(13, 2), batch_size=5, epochs=2, verbose=0, shuffle=False)
        else:
            model.fit(sparse_tensors(), epochs=2, verbose=0, shuffle=False)
        return [w.numpy() for w in model.weights]

    expected = fit()
    ad = replicas(2)
    with ad.scope():
        found = fit()
    assert ad._run.steps.strategy is not None
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def mean_of_words(table: tf.Variable, words: tf.RaggedTensor) -> tf.Tensor:
    return tf.reduce_mean(tf.ragged.map_flat_values(tf.gather, table, words), axis=1)


def sum_of_words(table: tf.Variable, words: tf.RaggedTensor) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(tf.gather(table, words.values), words.value_rowids(), words.nrows())


def largest_of_words(table: tf.Variable, words: tf.RaggedTensor) -> tf.Tensor:
    rows = tf.gather(table, words)
    return tf.squeeze(tf.reduce_max(rows, axis=-2, keepdims=True) - tf.reduce_min(rows, axis=[1], keepdims=True), 1)


def spread_of_words(table: tf.Variable, words: tf.RaggedTensor) -> tf.Tensor:
    return tf.math.reduce_variance(tf.gather(table, words), axis=1)


@pytest.mark.feature("function", "data: ragged tensors")
@pytest.mark.parametrize("pooled", [mean_of_words, sum_of_words, largest_of_words, spread_of_words])
def test_a_ragged_argument_trains_as_on_one_device(pooled: Callable[..., tf.Tensor]) -> None:
    rng = np.random.default_rng(0)
    batches = [
        tf.RaggedTensor.from_row_lengths(rng.integers(0, 9, sum(n)), n) for n in ([3, 1, 2, 4], [1, 5, 1, 1], [2, 1, 4])
    ]

    def train(wrap: Callable[..., Any]) -> np.ndarray:
        table = tf.Variable(np.arange(18.0).reshape(9, 2) / 10)

        @wrap
        def step(words: tf.RaggedTensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(pooled(table, words) - 1.0))
            gradient = tf.convert_to_tensor(tape.gradient(loss, table))
            table.assign_sub(0.1 * gradient)
            return loss

        losses = [float(step(words)) for words in batches]
        return np.concatenate([table.numpy().ravel(), losses])

    ad = replicas(2)
    with ad.scope():
        found = train(ad.function)
    np.testing.assert_allclose(found, train(tf.function), rtol=1e-12)
