"""Weights of sparse ids and masks of sparse tensors are paired with the matching entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec

BAGS = [[1, 2], [], [0], [3, 1, 2], [], [2], [1]]
WEIGHTS = [[0.5, 2], [], [0], [1, -3, 4], [], [1], [3]]

Pooled = Callable[[tf.Variable, Any, Any], tf.Tensor]


def replicas(count: int) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(count))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


def sparse(bags: list[list[float]], dtype: str) -> tf.SparseTensor:
    at = [(i, j) for i, bag in enumerate(bags) for j in range(len(bag))]
    return tf.SparseTensor(at, np.concatenate(bags).astype(dtype), (len(bags), 3))


def looked_up_safely(combiner: str) -> Pooled:
    return lambda table, ids, weights: tf.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner=combiner)


def looked_up(table: tf.Variable, ids: Any, weights: Any) -> tf.Tensor:
    filled, _ = tf.sparse.fill_empty_rows(ids, 3)
    more, _ = tf.sparse.fill_empty_rows(weights, 1.0)
    return tf.nn.embedding_lookup_sparse(table, filled, more, combiner="sum")


def kept_by_weights(table: tf.Variable, ids: Any, weights: Any) -> tf.Tensor:
    kept = tf.sparse.retain(ids, weights.values > 0.75)
    return tf.nn.safe_embedding_lookup_sparse(table, kept, combiner="sqrtn")


def train(wrap: Callable[..., Any], pooled: Pooled, sizes: tuple[int, ...]) -> np.ndarray:
    table = tf.Variable(np.random.default_rng(0).normal(size=(4, 2)))

    @wrap
    def step(ids: Any, weights: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(pooled(table, ids, weights) - 1.0))
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    given = [(sparse(BAGS[:n], "int64"), sparse(WEIGHTS[:n], "float64")) for n in sizes]
    return np.append([float(step(*batch)) for batch in given], table.numpy())


@pytest.mark.parametrize(
    "pooled",
    [*map(looked_up_safely, ("mean", "sqrtn")), looked_up, kept_by_weights],
    ids=["mean", "sqrtn", "a sum, after filling", "by a mask"],
)
def test_bags_with_weights_train_as_on_one_device_on_uneven_batches(
    pooled: Pooled, caplog: pytest.LogCaptureFixture
) -> None:
    ad = replicas(2)
    with ad.scope():
        found = train(ad.function, pooled, (7, 6, 3))
    np.testing.assert_allclose(found, train(tf.function, pooled, (7, 6, 3)), rtol=1e-12)
    assert not [r.message for r in caplog.records if "not known how" in r.message]


def test_weights_of_other_entries_than_the_ids_fail() -> None:
    ids, weights = sparse(BAGS[:2], "int64"), sparse([[1.0], [2.0]], "float64")
    ad = replicas(2)
    with ad.scope():
        table = tf.Variable(np.ones((4, 2)))

        @ad.function(batch="global")
        def step(ids: Any, weights: Any) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.safe_embedding_lookup_sparse(table, ids, weights))
            table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))
            return loss

        with pytest.raises(tf.errors.InvalidArgumentError):
            step(ids, weights)
