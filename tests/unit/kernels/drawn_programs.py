"""Random steps of arithmetic, writes and reads of variables, and ops that XLA cannot compile, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

COLUMNS = 3


@dataclass(frozen=True)
class Line:
    """One line of a program.

    Attributes:
        does: a key of ARITHMETIC, or "read", "assign", "add" or "after".
        first: which of the values so far it takes, from the last one.
        second: another one.
        state: which variable it touches.
    """

    does: str
    first: int
    second: int
    state: int


def _chosen(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the large elements, selected by an op whose shape depends on data."""
    return a + tf.reduce_sum(tf.boolean_mask(b, tf.abs(b) > 0.1), keepdims=True)[None] * 0.0 + tf.tanh(b)


def _by_python(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    made = tf.numpy_function(lambda x, y: np.tanh(x + y), [a, b], tf.float64)
    return tf.ensure_shape(made, a.shape)


ARITHMETIC: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": lambda a, b: 0.5 * (a + b),
    "product": lambda a, b: tf.tanh(a) * tf.tanh(b),
    "matrix": lambda a, b: tf.tanh(a @ (tf.transpose(b) @ b)),
    "reshape": lambda a, b: tf.reshape(tf.tanh(a), tf.shape(b)),
    "rows": lambda a, b: tf.gather(a, tf.argsort(tf.reduce_sum(b, 1))),
    "cond": lambda a, b: tf.cond(tf.reduce_sum(a) > 0, lambda: a * 0.5, lambda: b + 0.5),
    "chosen": _chosen,
    "python": _by_python,
}

_LINES = st.builds(
    Line,
    does=st.sampled_from([*ARITHMETIC, "read", "assign", "add", "after"]),
    first=st.integers(0, 3),
    second=st.integers(0, 3),
    state=st.integers(0, 1),
)


def programs() -> st.SearchStrategy[list[Line]]:
    return st.lists(_LINES, min_size=2, max_size=8)


def make_program(lines: Sequence[Line]) -> Callable[[tf.Tensor], tuple[tf.Tensor, ...]]:
    """A step of a batch (float64, n × 3) that trains a weight by a loss of all that its lines compute."""
    weight = tf.Variable(np.linspace(0.5, 1.0, COLUMNS), name="weight")
    states = [tf.Variable(np.linspace(0.1, 0.3, COLUMNS), trainable=False, name=f"state_{k}") for k in range(2)]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            values = [x * weight]
            for line in lines:
                values.append(_run(line, values, states))
            loss = tf.add_n([tf.reduce_mean(tf.square(value)) for value in values])
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss, *(tf.identity(state) for state in states)

    return step


@tf.autograph.experimental.do_not_convert
def _run(line: Line, values: Sequence[tf.Tensor], states: Sequence[tf.Variable]) -> tf.Tensor:
    first, second = (values[-1 - k % len(values)] for k in (line.first, line.second))
    state = states[line.state]
    match line.does:
        case "read":
            return first + state
        case "assign":
            state.assign(0.5 * state + 0.1 * tf.tanh(tf.reduce_mean(first, 0)))
            return tf.tanh(second)
        case "add":
            state.assign_add(0.1 * tf.tanh(tf.reduce_mean(first, 0)))
            return second * 0.5
        case "after":
            with tf.control_dependencies([first]):
                return tf.tanh(second) + 0.5
    return ARITHMETIC[line.does](first, second)
