"""Files that all workers write alike: the chief writes them once, since two at once spoil each other's parts.

A worker that writes somewhere else, or alone, writes by itself, as ever.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from autodist.capture.keras_files import SAVES

Write = Callable[[str, Callable[[], Any]], Any]
"""Lets one worker write, told what and how; gives what it gives, or None on the others."""

_own = threading.local()


def share_files(write: Write) -> None:
    """Lets `tf.train.Checkpoint` and Keras models be saved by `write`, for as long as the process lives."""
    checkpoint: Any = tf.train.Checkpoint
    checkpoint._write = _shared(checkpoint._write, "file_prefix", write)  # by which `save` and `write` do
    for name in SAVES:
        setattr(keras.Model, name, _shared(vars(keras.Model)[name], "filepath", write))


@contextmanager
def saving_models_alone() -> Iterator[None]:
    """Models that are saved within are saved by this worker alone, so that nobody needs to be asked."""
    with _noted("filepath"):
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
            with _noted("filepath", "file_prefix"):
                return plain(*args, **kwargs)

        found = write(f"{plain.__qualname__} {os.path.abspath(path)}", act)
        return os.fspath(path) if found is None and parameter == "file_prefix" else found

    return save
