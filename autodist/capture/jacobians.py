"""Writes out jacobians as one gradient for each element, if the elements are few.

TensorFlow vectorizes jacobians by ops with more axes, in which the batch axis cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.python.ops import gradients_util  # returns the tapes that record

from autodist.tf_compat.patches import TAPE_FUNCTION, TAPE_POP, TAPE_PUSH, patched, replaced

MOST_ELEMENTS = 64
"""Largest number of elements of a target that is written out; each takes a backward pass."""


@dataclass(frozen=True)
class Jacobian:
    """`tape.jacobian` as one gradient for each element of the target.

    Attributes:
        sources: a nest of tensors and variables to differentiate by.
        unconnected: the gradient of sources that the target does not depend on.
    """

    sources: Any
    unconnected: tf.UnconnectedGradients
    first_axis: ClassVar[int] = 0

    def is_written_out(self, target: tf.Tensor) -> bool:
        """Returns True if the elements of the target, or of each of its examples, are known to be few."""
        count = target.shape[self.first_axis :].num_elements()
        return count is not None and 0 < count <= MOST_ELEMENTS

    def of(self, tape: tf.GradientTape, target: tf.Tensor) -> Any:
        """Differentiates a target; a tape that is not persistent is used up."""
        with tape._ensure_recording():
            elements = self._elements(target)
        is_persistent = tape._persistent
        if tape._recording and not is_persistent:
            tape._pop_tape()
        with replaced(tape, "_persistent", True):
            rows = [tape.gradient(e, self.sources, unconnected_gradients=self.unconnected) for e in elements]
        if not is_persistent:
            tape._watched_variables, tape._tape = tape._tape.watched_variables(), None
        columns = zip(*map(tf.nest.flatten, rows), strict=True)
        made = [
            None if gradients[0] is None else self._together(target, [*map(tf.convert_to_tensor, gradients)])
            for gradients in columns
        ]
        return tf.nest.pack_sequence_as(self.sources, made)

    def _elements(self, target: tf.Tensor) -> Sequence[tf.Tensor]:
        return tf.unstack(tf.reshape(target, [target.shape.num_elements()]))

    def _together(self, target: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.reshape(tf.stack(gradients), tf.concat([target.shape, tf.shape(gradients[0])], 0))


class BatchJacobian(Jacobian):
    """`tape.batch_jacobian` as one gradient for each element of an example of the target."""

    first_axis = 1

    def _elements(self, target: tf.Tensor) -> Sequence[tf.Tensor]:
        return tf.unstack(tf.reshape(target, [-1, target.shape[1:].num_elements()]), axis=1)

    def _together(self, target: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        rows = tf.shape(gradients[0])
        with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(target)[0], rows[0])]):
            return tf.reshape(tf.stack(gradients, 1), tf.concat([[-1, *target.shape[1:]], rows[1:]], 0))


@contextmanager
def keeping_records() -> Iterator[None]:
    """Makes tapes keep their records when they differentiate, so that they can do so again, while the context is open.

    Scripts may do no more with a tape that is not persistent than before. TensorFlow puts conditionals and loops that
    such tapes record into functions, as for second derivatives; here they stay in the graph.
    """
    recording: list[tf.GradientTape] = []

    def pushed(push_tape: Any, self: tf.GradientTape) -> None:
        with replaced(self, "_persistent", True):
            push_tape(self)
        self._autodist_keeps_records = True
        recording.append(self)

    def popped(pop_tape: Any, self: tf.GradientTape) -> None:
        pop_tape(self)
        if self in recording:
            recording.remove(self)

    def is_first_order(inputs: Sequence[tf.Tensor]) -> bool:
        tape = recording[-1] if recording else None
        if tape is None or tape._persistent:
            return False
        with tape.stop_recording():
            return bool(gradients_util.PossibleTapeGradientTypes(inputs) == gradients_util.POSSIBLE_GRADIENT_TYPES_NONE)

    def in_graph(as_function: Any, make_op: Callable[[Any], Any], inputs: Sequence[tf.Tensor]) -> Any:
        return make_op(inputs) if is_first_order(inputs) else as_function(make_op, inputs)

    with patched({TAPE_PUSH: pushed, TAPE_POP: popped, TAPE_FUNCTION: in_graph}):
        yield


def keeps_records(tape: tf.GradientTape) -> bool:
    """Returns True if a tape can differentiate several times."""
    return tape._persistent or getattr(tape, "_autodist_keeps_records", False)
