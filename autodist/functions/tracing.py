"""How a step is traced, and what is said where it cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_NO_LENGTH = re.compile(r"NoneType|None values|\(None\)|elements of \[[^]]*None|partially known|got None")
"""In what TensorFlow, and Python, say of a length that is not known."""


@dataclass(frozen=True)
class Tracing:
    """How a step is traced; as for `tf.function`.

    Attributes:
        jit_compile: whether XLA is to compile the step.
        input_signature: shapes and dtypes of all arguments, for which it is traced once; None: those that come.
        reduce_retracing: whether shapes that differ are traced once more as one.
        autograph: whether Python's control flow is converted.
    """

    jit_compile: bool = False
    input_signature: Any = None
    reduce_retracing: bool = False
    autograph: bool = True

    def plain(self, function: Callable[..., Any]) -> Any:
        """The `tf.function` that is traced so."""
        return tf.function(
            function, self.input_signature, self.autograph, self.jit_compile or None, self.reduce_retracing
        )


BY_ITSELF = Tracing()
"""As `tf.function` traces where nothing is asked for."""


@contextmanager
def explaining_open_axes() -> Iterator[None]:
    """What TensorFlow raises where a step uses the length of a batch axis says where a None comes from."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if _NO_LENGTH.search(str(error)):
            error.add_note(
                "AutoDist captures a step with its batch axis open: x.shape[0] of an argument x is None there. Write "
                "tf.shape(x)[0] for it, or -1 where tf.reshape is to find it."
            )
        raise
