"""Local training steps: their kind, their line in the script, and variables that show if gradients were applied."""

from __future__ import annotations

import math
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist.capture.keras.libraries import legacy_keras

_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))

_NOT_THE_SCRIPT = (
    *(str(Path(module.__file__).parent) for module in (tf, keras, sys.modules["autodist"]) if module.__file__),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""Prefixes of files that contain no line of the script."""

_FRAMEWORKS = ("tensorflow", "keras", "tf_keras", "autodist")


class TrainingKind(Enum):
    """The kinds of local training."""

    FIT = "fit"
    FUNCTION = "function"
    EAGER = "eager"
    SESSION = "session"


@dataclass(frozen=True)
class LocalStep:
    """A training step that is not distributed.

    Attributes:
        kind: the kind of training.
        line: the script's line that builds or runs it; empty if unknown.
        graph: the graph of a session's step.
        library: the package with its code; empty for the script's own code, or Keras's.
    """

    kind: TrainingKind
    line: str
    graph: tf.Graph | None = None
    library: str = ""


def step_here(function: Any = None) -> LocalStep:
    """Returns the step that is being built or run.

    Args:
        function: the `tf.function` that is called; its converted code has no frame with its file.
    """
    frames = [*_frames()]
    files = {sys.modules[one.__module__].__file__ for one in _trainers()}
    if any(f.f_code.co_filename in files and f.f_code.co_name in ("fit", "train_on_batch") for f in frames):
        return LocalStep(TrainingKind.FIT, line_of_script())
    kind = TrainingKind.EAGER if tf.executing_eagerly() else TrainingKind.FUNCTION
    code = getattr(getattr(function, "python_function", None), "__code__", None)
    library = "" if code is None else _package_of(code.co_filename)
    return LocalStep(kind, line_of_script(), library=library or _library(frames))


def line_of_script() -> str:
    """Returns the innermost line of the script, as `train.py:12`."""
    for frame in _frames():
        file = frame.f_code.co_filename
        name = file.rpartition("/")[2]
        if not file.startswith(_NOT_THE_SCRIPT) and not _is_generated(name):
            return f"{name}:{frame.f_lineno}"
    return ""


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_generated(name: str) -> bool:
    return name.startswith("__autograph_generated_file")


def _library(frames: list[FrameType]) -> str:
    """Returns the package of the innermost frame outside of frameworks; empty if that is the script's."""
    for file in (frame.f_code.co_filename for frame in frames):
        if not file.startswith(_NOT_THE_SCRIPT) and not _is_generated(file.rpartition("/")[2]):
            return ""
        package = _package_of(file)
        if package:
            return package
    return ""


def _package_of(file: str) -> str:
    """Returns the installed package of a file; empty for a framework's, and for files that are not installed."""
    base = next((base for base in _PACKAGES if file.startswith(base)), None)
    package = "" if base is None else file[len(base) + 1 :].split("/", maxsplit=1)[0].removesuffix(".py")
    return "" if package in _FRAMEWORKS else package


def _trainers() -> Iterator[Any]:
    """Yields the classes that define `train_on_batch`."""
    legacy = legacy_keras()
    for model in (keras.Model, *([] if legacy is None else [legacy.Model])):
        yield next(base for base in model.__mro__ if "train_on_batch" in vars(base))


SUSPECTS = 4
"""Number of variables, the smallest of each gradient call, whose values are compared."""

_LARGE = 1 << 14


@dataclass(frozen=True)
class Suspect:
    """A variable with a gradient, and its value at that time; None if it had none yet.

    Small variables are kept alive: a model that is trained in a function may leave no other trace.
    """

    variable: Callable[[], Any]
    value: np.ndarray | None

    @property
    def has_changed(self) -> bool:
        """True if the value has changed, or one of the two values is unknown."""
        now = self._now()
        return self.value is None or now is None or not np.array_equal(self.value, now)

    @property
    def is_known_to_have_changed(self) -> bool:
        """True if both values are known and differ."""
        now = self._now()
        return self.value is not None and now is not None and not np.array_equal(self.value, now)

    def _now(self) -> np.ndarray | None:
        variable = self.variable()
        return None if variable is None else _value_of(variable)


def suspects_of(sources: Sequence[Any]) -> list[Suspect]:
    """Returns the smallest variables among the sources of gradients."""
    variables = sorted({id(s): s for s in sources if _size(s) is not None}.values(), key=lambda v: _size(v) or 0)
    return [Suspect(_kept(v), _value_of(v)) for v in variables[:SUSPECTS]]


def plain_variable(source: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; other sources as they are."""
    return source.value if isinstance(source, keras.Variable) else source


def _size(source: Any) -> int | None:
    """Returns the number of elements of a variable with a known shape; None for other sources."""
    if not isinstance(source, tf.Variable | keras.Variable) or source.shape is None:
        return None
    return math.prod(n or 0 for n in tf.TensorShape(source.shape).as_list())


def _kept(variable: Any) -> Callable[[], Any]:
    return (lambda: variable) if (_size(variable) or 0) < _LARGE else weakref.ref(variable)


def _value_of(variable: Any) -> np.ndarray | None:
    """Returns a variable's value, or two sums of a large one's; None if it has none yet."""
    plain = plain_variable(variable)
    with tf.init_scope():
        handle = getattr(plain, "handle", None)
        if not isinstance(handle, tf.Tensor) or not tf.executing_eagerly() or not hasattr(handle, "numpy"):
            return None
        if not tf.raw_ops.VarIsInitializedOp(resource=handle):
            return None
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=plain.dtype.base_dtype)
        if (_size(variable) or 0) >= _LARGE:
            value = tf.cast(value, tf.float64)
            value = tf.stack([tf.reduce_sum(value), tf.reduce_sum(value * value)])
        return np.asarray(value)
