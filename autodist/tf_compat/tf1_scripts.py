"""Branches and loops as TensorFlow 2 makes them, whatever a script of TensorFlow 1 has asked for."""

from __future__ import annotations

import contextlib
import threading
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


_lock = threading.Lock()
_ANY = tf.TensorShape([1])
_inside: list[None] = []
"""One for each thread that is inside, where the script has switched such shapes off."""


@contextlib.contextmanager
def plain_shapes() -> Iterator[None]:
    """While it is open, `shape[k]` is a number or None, as TensorFlow 2 has it.

    `tf.compat.v1.disable_v2_behavior()`, with which most scripts of TensorFlow 1 begin, makes it a `Dimension`, which
    is never None. The script finds it so when this ends, since it may ask for `x.shape[1].value`.
    """
    with _lock:
        is_other = bool(_inside) or type(_ANY[0]) is not int
        if is_other:
            _inside.append(None)
            tf.compat.v1.enable_v2_tensorshape()
    try:
        yield
    finally:
        with _lock:
            if is_other:
                _inside.pop()
                if not _inside:
                    tf.compat.v1.disable_v2_tensorshape()
