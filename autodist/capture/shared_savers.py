"""What all workers save by a `tf.compat.v1.train.Saver` under one path, one writes; each keeps account of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import SessionInterface  # by which a Saver knows that it is given a session


class _Writing(SessionInterface):
    """A session in which what a Saver runs to write its values is run by one worker.

    The rest of a Saver's work is done on every worker: which checkpoints there are each has to know, and what it writes
    of that it writes at once, alike.
    """

    def __init__(self, session: Any, saver: Any, write: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._session, self._saver, self._write = session, saver, write

    @property
    def graph(self) -> tf.Graph:
        return self._session.graph

    @property
    def sess_str(self) -> str:
        return str(self._session.sess_str)

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        act = functools.partial(self._session.run, fetches, feed_dict, options, run_metadata)
        said = self._saver.saver_def
        if fetches != said.save_tensor_name:
            return act()
        path = feed_dict[said.filename_tensor_name]
        found = self._write(f"Saver.save {os.path.abspath(path)}", act)
        return path if found is None else found


def write_by_one(plain: Callable[..., Any], write: Callable[[str, Callable[[], Any]], Any]) -> Callable[..., Any]:
    """`Saver.save`, by which one worker alone writes, as `write` decides.

    Args:
        plain: TensorFlow's `Saver.save`.
        write: is told what is written, and how; gives what that gives, or None where another worker writes.
    """

    @functools.wraps(plain)
    def save(self: Any, sess: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() or not isinstance(sess, SessionInterface):
            return plain(self, sess, *args, **kwargs)
        if (give := getattr(sess, "give_initial_values", None)) is not None:
            give()  # which all workers do
        return plain(self, _Writing(sess, self, write), *args, **kwargs)

    return save
