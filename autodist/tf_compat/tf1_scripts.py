"""Branches and loops as TensorFlow 2 makes them, whatever a script of TensorFlow 1 has asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def newer_control_flow() -> Iterator[None]:
    """While it is open, `tf.cond` and `tf.while_loop` make one node each, with functions for what they may run.

    `tf.compat.v1.disable_v2_behavior()`, with which most scripts of TensorFlow 1 begin, makes them many nodes of the
    graph itself. They compute the same; but what a node computes that does not run in a step is not known of those,
    nor what may wait for it. The script finds it as it was when this ends.
    """
    is_other = not tf.compat.v1.control_flow_v2_enabled()
    if is_other:
        tf.compat.v1.enable_control_flow_v2()
    try:
        yield
    finally:
        if is_other:
            tf.compat.v1.disable_control_flow_v2()
