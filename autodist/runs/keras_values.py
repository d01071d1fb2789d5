"""Values of Keras's large variables, computed or read when the first step takes the slices of each worker.

An initial value is computed then. A weight that Keras loads (`load_weights`, `from_preset`) is read from its file
again: loading checks the shape alone.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.capture.keras.distribution.run_settings import current_run
from autodist.errors import CheckpointError
from autodist.runtime.deferred_values import DeferredValue, defer, deferred
from autodist.runtime.eager_watch import is_watched
from autodist.runtime.variables import LARGE
from autodist.tf_compat.patches import (
    STORED_WEIGHT,
    VARIABLE_ASSIGN,
    VARIABLE_INITIALIZER,
    WEIGHTS_FILE,
    install,
)

_OF_KERAS = "keras.src.initializers."
"""Prefix of the modules of Keras's own initializers, whose values follow from their options and the seed."""


@functools.cache
def defer_values() -> None:
    """Defers the values of Keras's large variables from now on, in runs whose strategy divides variables.

    Before Keras 3.11, weights are read when they are loaded.
    """
    from keras.src.backend.config import backend

    if backend() != "tensorflow":
        return
    install(VARIABLE_INITIALIZER, _initialize)
    if STORED_WEIGHT.exists and WEIGHTS_FILE.exists:
        install(STORED_WEIGHT, _read)
        install(VARIABLE_ASSIGN, _assign)
        install(WEIGHTS_FILE, _open)


def _is_deferred(byte_size: int) -> bool:
    """Returns True if the run defers a value of that size."""
    run = current_run()
    return run is not None and run.divides_variables and byte_size >= LARGE


def _initialize(plain: Callable[..., None], variable: Any, initializer: Callable[..., Any]) -> None:
    """Wraps the method by which a Keras variable is set to the value of an initializer."""
    dtype, shape = tf.as_dtype(variable._dtype), tuple(variable._shape)
    if not _is_deferred(prod(shape) * dtype.size) or not _is_repeatable(initializer):
        plain(variable, initializer)
        return

    def compute() -> tf.Tensor:
        return tf.convert_to_tensor(initializer(shape, dtype=variable._dtype), dtype)

    def empty(shape: Sequence[int], dtype: str) -> tf.Tensor:
        """Returns memory that is not written, and which the system therefore need not provide."""
        return tf.raw_ops.Empty(shape=shape, dtype=dtype)

    with tf.init_scope():  # as TensorFlow does for variables that functions make, such as slots in a custom step
        plain(variable, empty)
        defer(variable._value, compute)


def _is_repeatable(initializer: Any) -> bool:
    """Returns True if each call of an initializer returns the same value, and none draws from a state."""
    with tf.init_scope():
        is_eager = tf.executing_eagerly()
    if not is_eager or not type(initializer).__module__.startswith(_OF_KERAS):
        return False
    return isinstance(getattr(initializer, "seed", 0), int)


class _WeightsFile:
    """An HDF5 file, which stays readable when its name is removed or belongs to another file.

    Args:
        path: the absolute path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)  # after the last value that is read from it
        self._stamp = self._now()
        self.values: weakref.WeakSet[DeferredValue] = weakref.WeakSet()

    @staticmethod
    def of(path: str) -> _WeightsFile:
        """Returns the file at a path; values of an unchanged file share it."""
        known = _files.get(path)
        if known is None or known._stamp != known._now() or not os.path.samestat(os.stat(path), known._stat()):
            known = _files[path] = _WeightsFile(path)
        return known

    def read(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns the value of a data set of the file.

        Raises:
            CheckpointError: the file has been written since.
        """
        import h5py

        if self._stamp != self._now():
            raise CheckpointError(
                f"{self.path} has been written since its weights were loaded, and before the first step, which reads "
                "them. Write another file, or load the weights again."
            )
        # By the open file, since another one may be at the path.
        with open(os.dup(self._descriptor), "rb") as opened, h5py.File(opened, "r") as file:
            return np.array(file[name], dtype=dtype)

    def _stat(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def _now(self) -> tuple[int, int]:
        stat = self._stat()
        return stat.st_size, stat.st_mtime_ns


_files: weakref.WeakValueDictionary[str, _WeightsFile] = weakref.WeakValueDictionary()
"""Files of values that have not been read, by path."""


class _Loaded(np.ndarray):
    """A value from a file, as Keras passes it to `Variable.assign`. It is read-only, so it stays equal to the file's.

    Attributes:
        source: the path of the file and the name of the data set; None for arrays made from the value.
    """

    source: tuple[str, str] | None = None


def _read(plain: Callable[..., Any], store: Any, key: str) -> Any:
    """Wraps the method by which Keras reads a value from a file."""
    value = plain(store, key)
    group = store._h5_entry_group
    if not _is_deferred(value.nbytes) or group.file.driver == "fileobj":
        return value  # the file of the driver "fileobj" is in memory, or a part of an archive
    loaded = value.view(_Loaded)
    loaded.source = os.path.abspath(group.file.filename), f"{group.name}/{key}"
    loaded.flags.writeable = False
    return loaded


def _assign(plain: Callable[..., Any], variable: Any, value: Any) -> Any:
    """Wraps `Variable.assign`."""
    if not isinstance(value, _Loaded) or value.source is None or not _can_defer(variable, value):
        return plain(variable, value)
    path, name = value.source
    file, dtype = _WeightsFile.of(path), value.dtype

    def compute() -> tf.Tensor:
        found = variable._convert_to_tensor(file.read(name, dtype), dtype=variable._dtype)
        return tf.cast(found, variable._value.dtype)

    with tf.init_scope():
        file.values.add(defer(variable._value, compute))
    return value


def _can_defer(variable: Any, value: np.ndarray) -> bool:
    """Returns True if no step has used the variable, and the value has its shape."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    target = variable._value
    if not tf.executing_eagerly() or in_stateless_scope() or target is None or tuple(target.shape) != value.shape:
        return False
    return deferred(target) is not None or not is_watched(target)


def _open(plain: Callable[..., Any], store: Any, path: Any, mode: str | None = None) -> Any:
    """Wraps the method by which Keras opens a file; the values of one that it writes over are read before."""
    known = None
    if (mode or store.mode) != "r" and isinstance(path, str | os.PathLike):
        known = _files.get(os.path.abspath(path))
    for value in [*known.values] if known is not None else ():
        value.hold()
    return plain(store, path, mode)
