"""Convolutions that TensorFlow fuses to what no server takes."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.runtime.fusions import may_fuse_convolutions


def graph_of(dtype: tf.DType, in_function: bool) -> tf.compat.v1.GraphDef:
    """One convolution, or one in a branch of a condition."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(dtype, [None, 4, 4, 1])
        kernel = tf.ones([3, 3, 1, 2], dtype)
        flag = tf.compat.v1.placeholder(tf.bool, [])
        convolved = lambda: tf.nn.conv2d(x, kernel, 1, "SAME")  # noqa: E731
        _ = tf.cond(flag, convolved, lambda: tf.concat([x, x], 3)) if in_function else convolved()
    return graph.as_graph_def()


@pytest.mark.parametrize("in_function", [False, True])
def test_only_those_of_bfloat16_are_kept_apart(in_function: bool) -> None:
    assert may_fuse_convolutions(graph_of(tf.float32, in_function))
    assert not may_fuse_convolutions(graph_of(tf.bfloat16, in_function))
