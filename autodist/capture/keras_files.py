"""Files that Keras's callbacks write: one worker's are enough, and on one machine they would be the same files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import callbacks
from keras.src.legacy.saving import legacy_h5_format  # the functions behind keras.saving.save_model and save_weights,
from keras.src.saving import saving_lib  # which scripts may have imported under names of their own

from autodist.capture.legacy_files import legacy_writers, silencing_table, telling_table
from autodist.capture.patches import patched
from autodist.capture.replaced import all_replaced

_WRITERS: tuple[type[callbacks.Callback], ...] = (
    callbacks.ModelCheckpoint,
    callbacks.BackupAndRestore,
    callbacks.CSVLogger,
    callbacks.TensorBoard,
    callbacks.OrbaxCheckpoint,
    callbacks.RemoteMonitor,  # writes to a server
)

SAVES = ("save", "save_weights", "export")
"""Methods of a model that write files."""


def names_of_writers(given: Iterable[callbacks.Callback]) -> list[str]:
    """The kinds of callbacks that write files."""
    writers = (*_WRITERS, *legacy_writers())
    return sorted({type(callback).__name__ for callback in given if isinstance(callback, writers)})


@contextmanager
def telling_of_saves(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` before a model is saved."""

    def telling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            tell()
            return plain(*args, **kwargs)

        return save

    saves = [(keras.Model, name, telling(vars(keras.Model)[name])) for name in SAVES]
    with all_replaced(saves), patched(telling_table(SAVES, telling)):
        yield


@contextmanager
def writing_nothing() -> Iterator[None]:
    """Lets callbacks do all that they do but write files: what they keep in mind and decide is as elsewhere.

    The methods of Keras's classes are replaced, not the callbacks, so that a script's own subclasses behave alike.
    """
    saving: list[tuple[Any, str, Any]] = [
        *((keras.Model, name, _nothing) for name in SAVES),
        (saving_lib, "save_model", _nothing),
        (saving_lib, "save_weights_only", _nothing),
        (legacy_h5_format, "save_model_to_hdf5", _nothing),
    ]
    no_writer = property(lambda self: tf.summary.create_noop_writer())
    board = [name for name in vars(callbacks.TensorBoard) if name.startswith("on_")]
    board += ["_write_keras_model_summary", "_configure_embeddings"]  # what `set_model` writes
    own = [
        (callbacks.ModelCheckpoint, "_save_model", _decide_whether_to_save),
        (callbacks.BackupAndRestore, "_load_model", _nothing),  # the chief's values come with the next step
        (callbacks.BackupAndRestore, "_save_model", _nothing),
        (callbacks.BackupAndRestore, "on_train_end", _nothing),
        (callbacks.CSVLogger, "on_train_begin", _log_into_nothing(callbacks.CSVLogger.on_train_begin)),
        *((callbacks.TensorBoard, name, no_writer) for name in ("_train_writer", "_val_writer")),
        *((callbacks.TensorBoard, name, _nothing) for name in board),
        (callbacks.OrbaxCheckpoint, "_save_checkpoint", _nothing),
        (callbacks.RemoteMonitor, "on_epoch_end", _nothing),
    ]
    with all_replaced([*saving, *own]), patched(silencing_table(SAVES)):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in place of a function that writes files."""


def _decide_whether_to_save(self: callbacks.ModelCheckpoint, epoch: int, batch: int | None, logs: Any) -> None:
    """Keeps the best value in mind; what there is to say of it the chief says."""
    verbose, self.verbose = self.verbose, 0
    try:
        with warnings.catch_warnings(action="ignore"):
            self._should_save_model(epoch, batch, logs, self._get_file_path(epoch, batch, logs))
    finally:
        self.verbose = verbose


def _log_into_nothing(plain: Callable[..., None]) -> Callable[..., None]:
    def on_train_begin(self: callbacks.CSVLogger, logs: Any = None) -> None:
        file, self.filename = self.filename, os.devnull
        try:
            plain(self, logs)
        finally:
            self.filename = file

    return on_train_begin
