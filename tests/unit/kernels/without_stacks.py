"""Creates operations without stack traces: TensorFlow keeps one for each, down to the frames of pytest.

Kernels need no operation's stack; only capture does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tensorflow.python.util import tf_stack  # not public: TensorFlow looks up the stack function here

from autodist.tf_compat.patches import replaced


@contextmanager
def without_stacks() -> Iterator[None]:
    """All operations that are made within have the same short stack."""
    one = _one_stack()
    with replaced(tf_stack, "extract_stack", lambda stacklevel=1: one):
        yield


@functools.cache
def _one_stack() -> Any:
    with ThreadPoolExecutor(1) as pool:  # a new thread has a new stack
        return pool.submit(tf_stack.extract_stack).result()
