"""Batches as Keras hands them to steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras import tree


def without_optionals(data: Any) -> Any:
    """A batch as Keras's own functions hand it to a step: what a generator leaves out is None."""
    return tree.map_structure(lambda x: None if isinstance(x, tf.experimental.Optional) else x, data)
