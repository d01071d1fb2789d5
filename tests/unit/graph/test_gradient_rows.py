"""The number of table rows that a batch touches, determined without running the step."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from autodist.capture.function import capture_function
from autodist.graph.gradient_rows import gradient_rows


def _rows(loss: Callable[..., tf.Tensor], *shapes: tuple[int, ...]) -> dict[str, int]:
    """Returns the rows for a step with a table and a dense kernel; input shapes have open first axes in the trace."""
    table, kernel = (tf.Variable(tf.ones([10, 4]), name=name) for name in ("table", "kernel"))
    optimizer = keras.optimizers.SGD()
    optimizer.build([table, kernel])

    def step(*inputs: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(table, kernel, *inputs)
        optimizer.apply_gradients(zip(tape.gradient(value, [table, kernel]), [table, kernel], strict=True))

    specs = tuple(tf.TensorSpec([None, *shape[1:]], tf.int32) for shape in shapes)
    captured = capture_function(step, specs, [0] * len(specs))
    return gradient_rows(captured.step, dict(zip(captured.inputs, shapes, strict=True)))


def test_a_lookup_touches_a_row_for_each_id() -> None:
    looked_up = lambda table, kernel, ids: tf.reduce_sum(tf.gather(table, ids)) + tf.reduce_sum(kernel)  # noqa: E731
    assert _rows(looked_up, (6, 5)) == {"table": 30}


def test_lookups_of_one_table_add_up() -> None:
    def loss(table: tf.Variable, kernel: tf.Variable, ids: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
        both = tf.reduce_sum(tf.gather(table, ids)) + tf.reduce_sum(tf.gather(table, others) ** 2)
        return both + tf.reduce_sum(kernel)

    assert _rows(loss, (6, 5), (3,)) == {"table": 33}


def test_a_number_of_rows_that_depends_on_the_data_is_not_told() -> None:
    def loss(table: tf.Variable, kernel: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.gather(table, tf.unique(tf.reshape(ids, [-1])).y)) + tf.reduce_sum(kernel)

    assert _rows(loss, (6, 5)) == {}


@pytest.mark.parametrize("shapes", [{}, {"other:0": (1,)}])
def test_without_the_inputs_lengths_nothing_is_told(shapes: dict[str, tuple[int, ...]]) -> None:
    table = tf.Variable(tf.ones([10, 4]))

    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.gather(table, ids))
        gradient = tape.gradient(value, table)
        table.scatter_sub(gradient)

    captured = capture_function(step, (tf.TensorSpec([None], tf.int32),), [0])
    assert gradient_rows(captured.step, shapes) == {}
