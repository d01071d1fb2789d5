"""Inspects the structure of `tf.data` pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def all_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a data set and, recursively, its inputs."""
    yield dataset
    for one in dataset._inputs():
        yield from all_of(one)


def kind_of(dataset: Any) -> str:
    """Returns TensorFlow's name for the operation of a data set: "Batch" for a `_BatchDataset`."""
    return type(dataset).__name__.removeprefix("_").removesuffix("Dataset")


def begins_within(dataset: Any) -> bool:
    """Returns True if one iteration restarts an input several times, each time with another shuffled order."""
    if not isinstance(dataset, tf.data.Dataset) or dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return False
    return any(kind_of(one) in ("Repeat", "Concatenate") for one in all_of(dataset))
