"""Shapes whose lengths are numbers, whatever a script of TensorFlow 1 has made of them for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

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
