"""Scripts whose steps `autodist plan` plans, and calls of the command."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from autodist.cli.app import app
from autodist.cli.plans import PlannedStrategy, Plans

RUNNER = CliRunner()

HEAD = """
import sys
import keras
import numpy as np
import tensorflow as tf
from autodist import AutoDist
"""

STEP = (
    HEAD
    + """
ad = AutoDist()
print("the script prints", ad.num_workers, ad.num_replicas, sys.argv[1:], __name__)
with ad.scope():
    table = tf.Variable(np.zeros((50, 4), np.float32), name="table")
    weight = tf.Variable(np.zeros((4, 3), np.float32), name="weight")
    moment = tf.Variable(np.zeros((4, 3), np.float32), name="moment", trainable=False)

    @ad.function
    def step(ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(table, ids) @ weight - y))
        of_table, of_weight = tape.gradient(loss, [table, weight])
        moment.assign(0.9 * moment + of_weight)
        weight.assign_sub(0.1 * moment)
        table.scatter_sub(tf.IndexedSlices(0.1 * of_table.values, of_table.indices))
        return loss

    step(np.arange(8), np.zeros((8, 3), np.float32))
raise RuntimeError("the step was made")
"""
)


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def plan(*words: str) -> Result:
    return RUNNER.invoke(app, ["plan", *words])


def plans_of(*words: str) -> tuple[PlannedStrategy, ...]:
    result = plan("--json", *words)
    assert result.exit_code == 0, result.stderr
    return Plans.model_validate_json(result.stdout).plans


GAN = (
    HEAD
    + """
ad = AutoDist()
def trained_by(step, table):
    def train(ids, target):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            loss = tf.reduce_mean(tf.square(rows - target)) + 0.0 * tf.reduce_sum(tf.gather(critic, ids))
        table.scatter_sub(tape.gradient(loss, table))
        return {"loss": loss, "rows": rows}
    train.__name__ = step
    return ad.function(train)

with ad.scope():
    critic = tf.Variable(np.zeros((90, 2)), name="critic")
    maker = tf.Variable(np.zeros((60, 2)), name="maker")
    critic_step, maker_step = trained_by("critic_step", critic), trained_by("maker_step", maker)
ids = np.arange(8)[ad.worker_index :: ad.num_workers]
"""
)
CALLS = """
found = critic_step(ids, np.zeros((len(ids), 2)))
assert found["rows"].shape == (len(ids), 2) and found["rows"].dtype == tf.float64 and float(found["loss"]) == 1
"""
