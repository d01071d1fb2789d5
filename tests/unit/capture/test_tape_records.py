from __future__ import annotations

from contextlib import ExitStack

import pytest
import tensorflow as tf

from autodist.capture.tape_records import has_recorded, noting_records


@pytest.mark.parametrize("contexts", [1, 2])
def test_a_tape_has_recorded_what_is_computed_while_it_records(contexts: int) -> None:
    """A scope and a step within it have a context each."""
    found = []
    with ExitStack() as stack, tf.Graph().as_default():
        for _ in range(contexts):
            stack.enter_context(noting_records())
        x = tf.constant(1.0)
        tape = tf.GradientTape(persistent=True)
        for _ in range(2):
            before = x + 1.0
            with tape:
                first = x + 2.0
                with tape.stop_recording():
                    between = x + 3.0
                last = x + 4.0
            found.append([has_recorded(tape, one) for one in (before, first, between, last, x + 5.0)])
    assert found == [[False, True, False, True, False]] * 2


def test_a_tape_from_before_counts_as_recording() -> None:
    with tf.Graph().as_default():
        tape = tf.GradientTape()
        with tape:
            x = tf.constant(1.0)
        with noting_records():
            assert has_recorded(tape, x + 1.0)
