"""Names of what a step takes from outside, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autodist.capture.replaced import replaced


@contextmanager
def naming_captures() -> Iterator[None]:
    """Within it, a captured tensor that nobody names is `captured`, where TensorFlow takes a number that counts what
    the process has done so far: workers that have done other things would capture graphs of different names."""
    kind = tf.__internal__.FuncGraph
    plain = kind.capture

    def capture(self: Any, tensor: Any, name: str | None = None, shape: Any = None) -> Any:
        if name is None and not hasattr(tensor, "graph"):
            name = "captured"
        return plain(self, tensor, name, shape)

    with replaced(kind, "capture", capture):
        yield
