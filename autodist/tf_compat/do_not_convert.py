"""Exclusion of our functions from AutoGraph, while functions of the script that they call are converted.

Converting one function takes 30 to 200 ms of processor time, and AutoGraph would convert all functions between
`tf.function` and the script's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tensorflow.python.autograph.core import ag_ctx, converter  # AutoGraph's state for called functions
from tensorflow.python.autograph.impl.api import autograph_artifact, converted_call  # the API of converted code

_Called = TypeVar("_Called", bound=Callable[..., Any])

_OPTIONS = converter.ConversionOptions(recursive=True, user_requested=False, optional_features=None)


def ours(function: _Called) -> _Called:
    """Marks a function that AutoGraph calls unconverted.

    `converting` wraps functions that it calls and that need conversion.
    """
    return autograph_artifact(function)


def converting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in an AutoGraph call: converts the script's functions, not TensorFlow's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, _OPTIONS):
            return converted_call(function, args, kwargs, options=_OPTIONS)

    return call
