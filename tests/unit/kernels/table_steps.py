"""Steps that train an embedding table in float64, for tests of the costs of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.graph.step import Step
from tests.unit.kernels.in_one_process import capture

ROWS, WIDTH = 40, 3

Gather = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def table_step(
    optimizer: keras.optimizers.Optimizer, gather: Gather = tf.gather, rows: int = ROWS, is_global: bool = False
) -> tuple[CapturedFunction, Callable[..., object]]:
    """A step of ids (int32, n × 2) that trains a table by an optimizer; captured, and as it is."""
    table = keras.Variable(np.random.default_rng(0).normal(size=(rows, WIDTH)), dtype="float64", name="table")
    optimizer.build([table])

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = gather(table.value, ids)
            loss = tf.reduce_mean(tf.square(found - 1.0)) + tf.reduce_mean(found[:, 0] * found[:, 1])
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
        return loss

    return capture(step, np.zeros((4, 2), np.int32), is_global=is_global), step


def repeated_ids(count: int, size: int, rows: int = 6, seed: int = 0) -> list[tuple[np.ndarray]]:
    """Batches of ids below `rows`, fewer than there are places, so that some repeat."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, rows, (size, 2)).astype(np.int32),) for _ in range(count)]


def nodes_with_rows(step: Step, rows: int) -> Sequence[str]:
    """`op name` of the nodes that make a tensor with `rows` rows, as TensorFlow infers shapes."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
    made = ((op, t) for op in graph.get_operations() for t in op.outputs if op.type not in ("Const", "VarHandleOp"))
    return [f"{op.type} {op.name}" for op, t in made if t.shape.rank and t.shape[0] == rows]
