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
from keras.src.legacy.saving import legacy_h5_format  # as in keras_files
from keras.src.saving import saving_lib
from tensorflow.python.saved_model import save as saved_model

from autodist.capture.keras_files import SAVES
from autodist.capture.shared_savers import write_by_one

Write = Callable[[str, Callable[[], Any]], Any]
"""Lets one worker write, told what and how; gives what it gives, or None on the others."""

_own = threading.local()


def writers() -> Iterator[tuple[Any, str, str]]:
    """What writes files, by its owner and name, and what it calls their path."""
    yield tf.train.Checkpoint, "_write", "file_prefix"  # by which `save` and `write` do
    yield from ((keras.Model, name, "filepath") for name in SAVES)
    yield saving_lib, "save_model", "filepath"  # by which keras.saving.save_model does, and so on
    yield saving_lib, "save_weights_only", "filepath"
    yield legacy_h5_format, "save_model_to_hdf5", "filepath"
    # It stands in a module for each name of TensorFlow's API; one that is imported later takes it from the first.
    for name, module in [*sys.modules.items()]:
        if name.startswith("tensorflow.") and vars(module).get("save") is saved_model.save:
            yield module, "save", "export_dir"


def share_files(write: Write) -> None:
    """Lets what TensorFlow and Keras save be saved by `write`, for as long as the process lives."""
    shared: dict[Callable[..., Any], Callable[..., Any]] = {}
    for owner, name, parameter in [*writers()]:
        plain = vars(owner)[name]
        setattr(owner, name, shared.setdefault(plain, _shared(plain, parameter, write)))
    saver: Any = tf.compat.v1.train.Saver
    saver.save = write_by_one(saver.save, write)


@contextmanager
def saving_models_alone() -> Iterator[None]:
    """Models that are saved within are saved by this worker alone, so that nobody needs to be asked."""
    with _noted("filepath", "export_dir"):
        yield


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

        def act() -> Any:
            with _noted("filepath", "file_prefix", "export_dir"):
                return plain(*args, **kwargs)

        found = write(f"{plain.__qualname__} {os.path.abspath(path)}", act)
        return os.fspath(path) if found is None and parameter == "file_prefix" else found

    return save
