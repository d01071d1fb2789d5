"""A default graph with batches for propagation tests."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.layout.graphs import Case


@pytest.fixture
def case():
    """Returns a graph with a batch of vectors `x`, sequences `s`, labels `y` and masks `m`."""
    built = Case()
    with built.graph.as_default():
        built.batch("x", 3)
        built.batch("s", None, 4)
        built.batch("y", dtype=tf.int64)
        built.batch("m", None, dtype=tf.bool)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(3)
    return {
        "x": rng.uniform(0.5, 2, (7, 3)),
        "s": rng.uniform(0.5, 2, (7, 5, 4)),
        "y": rng.integers(0, 3, 7),
        "m": rng.uniform(size=(7, 5)) > 0.4,
    }
