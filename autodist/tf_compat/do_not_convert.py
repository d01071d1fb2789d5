"""AutoGraph reads the script's functions, and none of ours: what we call of the script is converted all the same.

To read one function takes it 30 to 200 ms of processor time, and it would read all that stand between `tf.function` and
the script's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tensorflow.python.autograph.core import ag_ctx, converter  # how it goes on from one function to the next
from tensorflow.python.autograph.impl.api import autograph_artifact, converted_call  # what its own code calls

_Called = TypeVar("_Called", bound=Callable[..., Any])

_GOES_ON = converter.ConversionOptions(recursive=True, user_requested=False, optional_features=None)


def ours(function: _Called) -> _Called:
    """A function that AutoGraph calls as it is. What it is to convert of what this one calls, `converting` says."""
    return autograph_artifact(function)


def converting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function as code that AutoGraph has converted would: the script's is converted, TensorFlow's is not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, _GOES_ON):
            return converted_call(function, args, kwargs, options=_GOES_ON)

    return call
