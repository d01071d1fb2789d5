"""Errors in a script's call of Keras show its own lines, and none of what stands around the call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import keras

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_Method = TypeVar("_Method", bound=Callable[..., Any])


def hiding_own_frames(method: _Method) -> _Method:
    """A method whose errors leave AutoDist's frames out, as Keras does with its own, and unless it does not.

    `keras.config.disable_traceback_filtering()` shows all frames.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if keras.config.is_traceback_filtering_enabled():
                error.__traceback__ = _without_ours(error.__traceback__)
            raise

    return call  # type: ignore[return-value]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for one in reversed(frames):
        if not one.tb_frame.f_code.co_filename.startswith(_OURS):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept
