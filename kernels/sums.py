"""Sums whose bits do not depend on the run."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def ordered_sum(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of tensors of one shape, added in their order.

    `tf.add_n` begins with whichever input's memory it may use again, and a chain of additions is made an `add_n` by
    TensorFlow's optimizer: from three terms on, both differ in their last bits from worker to worker and from run to
    run.
    """
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:  # their order does not matter
        return tf.raw_ops.AddV2(x=parts[0], y=parts[1])
    return tf.reduce_sum(tf.stack(parts), 0)
