"""By what a script trains by itself, and in which line of it."""

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

from autodist.capture.keras_libraries import legacy_keras

_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))

_NOT_THE_SCRIPT = (
    *(str(Path(module.__file__).parent) for module in (tf, keras, sys.modules["autodist"]) if module.__file__),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""How the names of files begin that hold no line of the script."""

_FRAMEWORKS = ("tensorflow", "keras", "tf_keras", "autodist")


class Way(Enum):
    """By what a script trains by itself."""

    FIT = "fit"
    FUNCTION = "function"
    EAGER = "eager"
    SESSION = "session"


@dataclass(frozen=True)
class LocalStep:
    """A training step that is not distributed.

    Attributes:
        way: in what it is run.
        line: of the script, where it was made or run; empty where that is not known.
        graph: of a session's step.
        library: the package whose code makes it; empty where the script's own does, or Keras's.
    """

    way: Way
    line: str
    graph: tf.Graph | None = None
    library: str = ""


def step_here(function: Any = None) -> LocalStep:
    """The step that is being made or run.

    Args:
        function: the `tf.function` that is called; its code is converted, so that no frame tells its file.
    """
    frames = [*_frames()]
    files = {sys.modules[one.__module__].__file__ for one in _trainers()}
    if any(f.f_code.co_filename in files and f.f_code.co_name in ("fit", "train_on_batch") for f in frames):
        return LocalStep(Way.FIT, line_of_script())
    way = Way.EAGER if tf.executing_eagerly() else Way.FUNCTION
    code = getattr(getattr(function, "python_function", None), "__code__", None)
    library = "" if code is None else _package_of(code.co_filename)
    return LocalStep(way, line_of_script(), library=library or _library(frames))


def line_of_script() -> str:
    """The innermost line that is the script's own, as `train.py:12`."""
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
    """The package of the innermost frame that belongs to no framework; empty where that is the script's."""
    for file in (frame.f_code.co_filename for frame in frames):
        if not file.startswith(_NOT_THE_SCRIPT) and not _is_generated(file.rpartition("/")[2]):
            return ""
        package = _package_of(file)
        if package:
            return package
    return ""


def _package_of(file: str) -> str:
    """The installed package that a file belongs to; empty for a framework's, and for what is not installed."""
    base = next((base for base in _PACKAGES if file.startswith(base)), None)
    package = "" if base is None else file[len(base) + 1 :].split("/", maxsplit=1)[0].removesuffix(".py")
    return "" if package in _FRAMEWORKS else package


def _trainers() -> Iterator[Any]:
    """The classes that define `train_on_batch`."""
    legacy = legacy_keras()
    for model in (keras.Model, *([] if legacy is None else [legacy.Model])):
        yield next(base for base in model.__mro__ if "train_on_batch" in vars(base))
