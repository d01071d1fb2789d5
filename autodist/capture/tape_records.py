"""The values that a tape has recorded: those that the script computes while the tape records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops  # the numbers of tensors

from autodist.tf_compat.patches import TAPE_POP, TAPE_PUSH, patched


@contextmanager
def noting_records() -> Iterator[None]:
    """Notes when tapes record, while the context is open; contexts may be nested."""

    def pushed(push_tape: Callable[..., Any], self: tf.GradientTape) -> None:
        if self._tape is None:  # a new tape, or one that was reset
            self._autodist_changes = []
        push_tape(self)
        changes = _changes_of(self)
        if len(changes) % 2 == 0:
            changes.append(ops.uid())

    def popped(pop_tape: Callable[..., Any], self: tf.GradientTape) -> None:
        pop_tape(self)
        changes = _changes_of(self)
        if len(changes) % 2 == 1:
            changes.append(ops.uid())

    with patched({TAPE_PUSH: pushed, TAPE_POP: popped}):
        yield


def _changes_of(tape: tf.GradientTape) -> list[int]:
    """Returns the numbers at which a tape began to record and ended, in turns; none for a tape that is not noted.

    TensorFlow numbers all tensors in the order in which they are created.
    """
    found: list[int] = getattr(tape, "_autodist_changes", [])
    return found


def has_recorded(tape: tf.GradientTape, tensor: tf.Tensor) -> bool:
    """Returns False for a tensor that was computed while the tape did not record; gradients end there."""
    changes = _changes_of(tape)
    return not changes or sum(number < tensor._id for number in changes) % 2 == 1
