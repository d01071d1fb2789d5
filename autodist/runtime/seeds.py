"""The run's seed reaches every random operation that has none, so that all workers shuffle and initialise alike."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed  # where every random operation, datasets' too, asks for its seeds

_MOST = 2**31 - 1  # TensorFlow keeps the seeds of operations below it

_given: set[int] = set()
"""The seeds that were set here, and not by the script."""


def seed_what_has_no_seed(seed: int) -> None:
    """Sets TensorFlow's seed, of the default graph where one is being built, unless the script has set it.

    An operation that has a seed of its own draws what it draws in a script that sets no seed for all: TensorFlow would
    mix the two, and `shuffle(seed=1)` would give another order than without AutoDist.
    """
    if _seed_for_all() is not None:  # asking for an operation's seeds would tell too, and use one up
        return
    (tf.random.set_seed if tf.executing_eagerly() else tf.compat.v1.set_random_seed)(seed)
    if not _given:
        random_seed.get_seed = _leaving_own_seeds(random_seed.get_seed)
    _given.add(seed)


def _leaving_own_seeds(plain: Callable[[int | None], tuple[int | None, int | None]]) -> Callable[..., object]:
    @functools.wraps(plain)
    def get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
        if op_seed is not None and _seed_for_all() in _given:
            return random_seed.DEFAULT_GRAPH_SEED, op_seed % _MOST
        return plain(op_seed)

    return get_seed


def _seed_for_all() -> int | None:
    """Of the graph that is being built, or of the process."""
    return context.global_seed() if tf.executing_eagerly() else tf.compat.v1.get_default_graph().seed
