"""Makes the chief alone write files that all workers would write to one path, since concurrent writers corrupt them.

A worker that writes to another path, or alone, writes its own files.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import SessionInterface  # a Saver checks that its session is one

from autodist.tf_compat.import_hooks import once_imported
from autodist.tf_compat.patches import (
    CHECKPOINT_SAVE,
    LEGACY_SAVES,
    MANAGER_FILES,
    SAVED_MODEL_SAVE,
    SAVER_SAVE,
    SAVES,
    Patch,
    patched,
    put,
    replaced,
)

Write = Callable[[str, Callable[[], Any]], Any]
"""Runs a function, with a description of the file, on one worker; returns its result there and None on the others."""

_BY = "_autodist_writes_by"
"""Attribute of a shared function: the `Write` that it uses."""

_LeavesFiles = tuple[Callable[[], bool], Callable[[str], None]]


class _State(threading.local):
    """The state of saving in one thread.

    Attributes:
        is_alone: True if this worker saves without the others.
        leaves_files: the arguments of `saving_with_chief`; None outside of it.
    """

    is_alone = False
    leaves_files: _LeavesFiles | None = None


_state = _State()


def writers() -> Iterator[tuple[Patch, str]]:
    """Yields the functions that write files, each with its parameter for the path."""
    yield CHECKPOINT_SAVE, "file_prefix"
    saves = [*SAVES, *LEGACY_SAVES] if "tf_keras" in sys.modules else SAVES
    yield from ((row, "filepath") for row in saves)
    # Each name in TensorFlow's API is in a module of its own; one that is imported later copies it from the first.
    saved_model_save = SAVED_MODEL_SAVE.plain()
    for name, module in [*sys.modules.items()]:
        if name.startswith("tensorflow.") and vars(module).get("save") is saved_model_save:
            yield replace(SAVED_MODEL_SAVE, path=name), "export_dir"


def share_files(write: Write) -> None:
    """Makes TensorFlow and Keras save files through `write` for the rest of the process.

    A later call includes modules that the script has imported since.
    """
    shared: dict[Callable[..., Any], Callable[..., Any]] = {}
    for row, parameter in [*writers()]:
        plain = row.plain()
        if getattr(plain, _BY, None) != write:
            put(row, shared.setdefault(plain, _shared(plain, parameter, write)))
    saver = SAVER_SAVE.plain()
    if getattr(saver, _BY, None) != write:
        put(SAVER_SAVE, write_by_one(saver, write))


def share_files_from_now_on(write: Write) -> None:
    """As `share_files`; files of tf_keras, too, as soon as the script or a library imports it."""
    share_files(write)
    if "tf_keras" not in sys.modules:
        once_imported("tf_keras", lambda: share_files(write))


def saving_alone() -> AbstractContextManager[None]:
    """Makes this worker save without the others while the context is open."""
    return replaced(_state, "is_alone", True)


def saving_with_chief(have_joined: Callable[[], bool], note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Makes a worker leave files to the chief, and records their paths, while the context is open.

    Args:
        have_joined: returns True if the workers can agree on the writer; until then the chief writes.
        note: called with the path of a file that the chief writes.
    """
    return replaced(_state, "leaves_files", (have_joined, note))


def _shared(plain: Callable[..., Any], parameter: str, write: Write) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def save(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind_partial(*args, **kwargs).arguments
        path = arguments.get(parameter)
        if _state.is_alone or not isinstance(path, str | os.PathLike):
            return plain(*args, **kwargs)

        has_written = False

        def act() -> Any:
            nonlocal has_written
            has_written = True
            with saving_alone():
                return plain(*args, **kwargs)

        leaves_files, found = _state.leaves_files, None
        if leaves_files is None or leaves_files[0]():
            found = write(f"{plain.__qualname__} {os.path.abspath(path)}", act)
        if leaves_files is not None and not has_written:
            leaves_files[1](os.path.abspath(path))
        if has_written or parameter != "file_prefix":
            return found
        _list_in_manager(arguments.get("options"), os.fspath(path))
        return os.fspath(path)

    setattr(save, _BY, write)
    return save


def _list_in_manager(options: tf.train.CheckpointOptions | None, path: str) -> None:
    """Adds a checkpoint that another worker has written to the list of a `CheckpointManager`, without its files."""
    callbacks = (options.experimental_write_callbacks if options else None) or ()
    lists = [c for c in callbacks if getattr(c, "__qualname__", "").startswith("CheckpointManager.")]
    with patched(dict.fromkeys(MANAGER_FILES, lambda *_: None)):
        for callback in lists:
            callback(path)


class _Writing(SessionInterface):
    """A session in which one worker runs the operation by which a Saver writes its values.

    All workers do the rest of a Saver's work: each needs the list of checkpoints, and writes it at once, alike.
    """

    def __init__(self, session: Any, saver: Any, write: Write) -> None:
        self._session, self._saver, self._write = session, saver, write

    @property
    def graph(self) -> tf.Graph:
        return self._session.graph

    @property
    def sess_str(self) -> str:
        return str(self._session.sess_str)

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        act = functools.partial(self._session.run, fetches, feed_dict, options, run_metadata)
        saver_def = self._saver.saver_def
        if fetches != saver_def.save_tensor_name:
            return act()
        path = feed_dict[saver_def.filename_tensor_name]
        found = self._write(f"Saver.save {os.path.abspath(path)}", act)
        return path if found is None else found


def write_by_one(plain: Callable[..., Any], write: Write) -> Callable[..., Any]:
    """Wraps `Saver.save` so that one worker writes, as `write` decides.

    Args:
        plain: TensorFlow's `Saver.save`.
        write: runs a function, with a description of the file, on one worker; returns None on the others.
    """

    @functools.wraps(plain)
    def save(self: Any, sess: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() or not isinstance(sess, SessionInterface):
            return plain(self, sess, *args, **kwargs)
        if (give := getattr(sess, "give_initial_values", None)) is not None:
            give()  # on all workers
        return plain(self, _Writing(sess, self, write), *args, **kwargs)

    setattr(save, _BY, write)
    return save
