"""TensorFlow 2 control flow and shapes inside a TensorFlow 1 script."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import tensorflow as tf

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def newer_control_flow() -> Iterator[None]:
    """Within the context, `tf.cond` and `tf.while_loop` create one node each, with functions for their bodies.

    `tf.compat.v1.disable_v2_behavior()`, with which most TensorFlow 1 scripts start, makes them create many nodes in
    the graph. The results are equal, but values of branches that do not run, and their control dependencies, would be
    unknown. The script's setting is restored at the end.
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
"""One entry for each thread inside, if the script has disabled such shapes."""


@contextlib.contextmanager
def plain_shapes() -> Iterator[None]:
    """Within the context, `shape[k]` is an integer or None, as in TensorFlow 2.

    `tf.compat.v1.disable_v2_behavior()`, with which most TensorFlow 1 scripts start, makes it a `Dimension`, which is
    never None. The setting is restored at the end, since the script may read `x.shape[1].value`.
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
                if len(_inside) == 1:
                    tf.compat.v1.disable_v2_tensorshape()
                _inside.pop()


def within_plain_shapes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: calls the function within `plain_shapes`, which takes no time if the script has not disabled them."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _inside and type(_ANY[0]) is int:
            return function(*args, **kwargs)
        with plain_shapes():
            return function(*args, **kwargs)

    return call
