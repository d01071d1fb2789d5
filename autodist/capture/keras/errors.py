"""Errors of models, as the script sees them: without frames of AutoDist, and with a note on graphs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import keras


@contextmanager
def explaining_graphs(model: Any) -> Iterator[None]:
    """Adds a note to errors of a step of an eager model: the step runs as a graph."""
    try:
        yield
    except Exception as error:
        if model.run_eagerly and not isinstance(error, StopIteration):
            error.add_note(
                f"{model.name} is compiled with run_eagerly=True, and AutoDist compiles its steps all the same: there "
                "tensors have no values yet. Code that needs values (x.numpy(), say) can run in tf.py_function or in a "
                "callback; tf.print prints them."
            )
        raise


_OWN_FOLDER = os.path.dirname(sys.modules["autodist"].__file__ or "") + os.sep
_Method = TypeVar("_Method", bound=Callable[..., Any])


def hiding_own_frames(method: _Method) -> _Method:
    """Wraps a method so that its errors show no frames of AutoDist, as Keras does for its own frames.

    `keras.config.disable_traceback_filtering()` shows all frames.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if keras.config.is_traceback_filtering_enabled():
                error.__traceback__ = _without_own_frames(error.__traceback__)
            raise

    return call  # type: ignore[return-value]


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for one in reversed(frames):
        if not one.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept
