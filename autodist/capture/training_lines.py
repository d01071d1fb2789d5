"""The kind of a local training step and its line in the script."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import keras
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
