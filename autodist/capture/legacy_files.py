"""Files that callbacks of tf_keras write, as `keras_files` has it for those of Keras 3."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from autodist.capture.keras_libraries import legacy_keras
from autodist.capture.patches import Patch

_VERSIONS = ("tf_keras", "2.18")


def legacy_writers() -> tuple[type[Any], ...]:
    """The kinds of callbacks of tf_keras that write files; none where the script has not imported it."""
    legacy = legacy_keras()
    if legacy is None:
        return ()
    names = ("ModelCheckpoint", "BackupAndRestore", "CSVLogger", "TensorBoard", "RemoteMonitor")
    return tuple(getattr(legacy.callbacks, name) for name in names)


def telling_table(saves: tuple[str, ...], telling: Callable[[Any], Any]) -> list[Patch]:
    """What is replaced on the chief, so that its saves are told; empty without tf_keras."""
    legacy = legacy_keras()
    return [] if legacy is None else [Patch(legacy.Model, name, telling, _VERSIONS) for name in saves]


def chiefs_table(alone: Callable[[Any], Any]) -> list[Patch]:
    """What is replaced on the chief, where `alone` lets it save without the others; empty without tf_keras."""
    state = _training_state()
    return [] if state is None else [Patch(state, "back_up", alone, _VERSIONS)]


def silencing_table(saves: tuple[str, ...]) -> list[Patch]:
    """What is replaced on a worker that writes nothing; empty without tf_keras."""
    legacy = legacy_keras()
    if legacy is None:
        return []
    callbacks, state = legacy.callbacks, _training_state()
    board = [name for name in vars(callbacks.TensorBoard) if name.startswith("on_")]
    board += ["_write_keras_model_summary", "_configure_embeddings"]  # what `set_model` writes
    silent = [
        *((legacy.Model, name) for name in saves),
        *((callbacks.ModelCheckpoint, name) for name in ("_save_handler", "_maybe_remove_file")),
        *((state, name) for name in ("back_up", "restore", "delete_backup", "backup_if_preempted")),
        *((callbacks.TensorBoard, name) for name in board),
        (callbacks.RemoteMonitor, "on_epoch_end"),
    ]
    others: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (callbacks.ModelCheckpoint, "_get_file_path", _no_path),
        (callbacks.ModelCheckpoint, "_save_model", _quiet),
        (callbacks.CSVLogger, "on_train_begin", _into_nothing),
        (callbacks.TensorBoard, "_train_writer", _no_writer),
        (callbacks.TensorBoard, "_val_writer", _no_writer),
    ]
    rows = [*((owner, name, _silent) for owner, name in silent), *others]
    return [Patch(owner, name, wrapper, _VERSIONS) for owner, name, wrapper in rows]


def _training_state() -> Any | None:
    """By which BackupAndRestore saves."""
    if legacy_keras() is None:
        return None
    from tf_keras.src.distribute.worker_training_state import WorkerTrainingState  # only where the script has tf_keras

    return WorkerTrainingState


def _silent(plain: Any) -> Any:
    @functools.wraps(plain)
    def nothing(*args: Any, **kwargs: Any) -> None:
        """Stands in place of a method that writes files."""

    return nothing


def _no_path(plain: Any) -> Any:
    return lambda self, epoch, batch, logs: ""  # in no folder, which would be made


def _no_writer(plain: Any) -> Any:
    return property(lambda self: tf.summary.create_noop_writer())


def _quiet(save: Any) -> Any:
    """Keeps the best value in mind; what there is to say of it the chief says."""

    @functools.wraps(save)
    def save_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        verbose, self.verbose = self.verbose, 0
        try:
            save(self, *args, **kwargs)
        finally:
            self.verbose = verbose

    return save_quietly


def _into_nothing(begin: Any) -> Any:
    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        file, self.filename = self.filename, os.devnull
        try:
            begin(self, logs)
        finally:
            self.filename = file

    return on_train_begin
