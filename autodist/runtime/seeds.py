"""The run's seed reaches every random operation that has none, so that all workers shuffle and initialise alike."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework import random_seed


def seed_what_has_no_seed(seed: int) -> None:
    """Sets TensorFlow's seed, of the default graph where one is being built, unless the script has set it."""
    if tf.executing_eagerly():
        if random_seed.get_seed(None) == (None, None):
            tf.random.set_seed(seed)
    elif tf.compat.v1.get_default_graph().seed is None:
        tf.compat.v1.set_random_seed(seed)
