"""Files that all workers write alike: the chief writes them once, since two at once spoil each other's parts.

A worker that writes somewhere else, or alone, writes by itself, as ever.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format  # the functions behind keras.saving.save_model and save_weights,
from keras.src.saving import saving_lib  # which scripts may have imported under names of their own
from tensorflow.python.client.session import SessionInterface  # by which a Saver knows that it is given a session
from tensorflow.python.saved_model import save as saved_model

Write = Callable[[str, Callable[[], Any]], Any]
"""Lets one worker write, told what and how; gives what it gives, or None on the others."""

SAVES = ("save", "save_weights", "export")
"""Methods of a model that write files."""

KINDS = ("filepath", "file_prefix", "export_dir")
"""Parameters that name the files, one for each kind of saving."""

_BY = "_autodist_writes_by"
"""What is shared says so by an attribute."""

_own = threading.local()


def writers() -> Iterator[tuple[Any, str, str]]:
    """What writes files, by its owner and name, and what it calls their path."""
    yield tf.train.Checkpoint, "_write", "file_prefix"  # by which `save` and `write` do
    yield from ((keras.Model, name, "filepath") for name in SAVES)
    yield saving_lib, "save_model", "filepath"  # by which keras.saving.save_model does, and so on
    yield saving_lib, "save_weights_only", "filepath"
    yield legacy_h5_format, "save_model_to_hdf5", "filepath"
    yield from _writers_of_tf_keras()
    # It stands in a module for each name of TensorFlow's API; one that is imported later takes it from the first.
    for name, module in [*sys.modules.items()]:
        if name.startswith("tensorflow.") and vars(module).get("save") is saved_model.save:
            yield module, "save", "export_dir"


def _writers_of_tf_keras() -> Iterator[tuple[Any, str, str]]:
    """Of Keras 2 beside Keras 3, where the script has imported it."""
    models = sys.modules.get("tf_keras")
    if models is None:
        return
    yield from ((models.Model, name, "filepath") for name in SAVES)
    for name in ("saving.saving_lib", "saving.legacy.save"):  # by which tf_keras.models.save_model does, and so on
        module = sys.modules.get(f"tf_keras.src.{name}")
        for act in ("save_model", "save_weights_only", "save_weights"):
            if hasattr(module, act):
                yield module, act, "filepath"


def share_files(write: Write) -> None:
    """Lets what TensorFlow and Keras save be saved by `write`, for as long as the process lives.

    Called again, it takes in what the script has imported since.
    """
    shared: dict[Callable[..., Any], Callable[..., Any]] = {}
    for owner, name, parameter in [*writers()]:
        plain = vars(owner)[name]
        if getattr(plain, _BY, None) != write:
            setattr(owner, name, shared.setdefault(plain, _shared(plain, parameter, write)))
    saver: Any = tf.compat.v1.train.Saver
    if getattr(saver.save, _BY, None) != write:
        saver.save = write_by_one(saver.save, write)
        setattr(saver.save, _BY, write)


@contextmanager
def saving_alone() -> Iterator[None]:
    """While it is open, this worker saves without asking the others."""
    with _noted(*KINDS):
        yield


@contextmanager
def saving_with_chief(have_joined: Callable[[], bool], note: Callable[[str], None]) -> Iterator[None]:
    """While it is open, another worker than the chief leaves to it what it may write, and notes the paths of that.

    Args:
        have_joined: returns True if the workers can agree on who writes; before that, the chief does.
        note: takes the path of what the chief writes.
    """
    before = _leaving()
    _own.leaving = have_joined, note
    try:
        yield
    finally:
        _own.leaving = before


def _leaving() -> tuple[Callable[[], bool], Callable[[str], None]] | None:
    found: tuple[Callable[[], bool], Callable[[str], None]] | None = getattr(_own, "leaving", None)
    return found


@contextmanager
def _noted(*parameters: str) -> Iterator[None]:
    before = _alone()
    _own.alone = before | {*parameters}
    try:
        yield
    finally:
        _own.alone = before


def _alone() -> frozenset[str]:
    """The kinds of saving, by their parameter, for which nobody is asked."""
    found: frozenset[str] = getattr(_own, "alone", frozenset())
    return found


def _shared(plain: Callable[..., Any], parameter: str, write: Write) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def save(*args: Any, **kwargs: Any) -> Any:
        path = signature.bind_partial(*args, **kwargs).arguments.get(parameter)
        if parameter in _alone() or not isinstance(path, str | os.PathLike):
            return plain(*args, **kwargs)

        has_written = False

        def act() -> Any:
            nonlocal has_written
            has_written = True
            with saving_alone():
                return plain(*args, **kwargs)

        leaving, found = _leaving(), None
        if leaving is None or leaving[0]():
            found = write(f"{plain.__qualname__} {os.path.abspath(path)}", act)
        if leaving is not None and not has_written:
            leaving[1](os.path.abspath(path))
        return os.fspath(path) if found is None and parameter == "file_prefix" else found

    setattr(save, _BY, write)
    return save


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
