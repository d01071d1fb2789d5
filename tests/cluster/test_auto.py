"""`strategy: Auto` on real processes: measured, chosen, the numbers of one device; kept in files and checkpoints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from autodist.checkpoint.folder import Folder
from autodist.checkpoint.read import read_about
from autodist.runs.measuring.kept_choices import CHOICES
from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NODES = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]


def train(ad: Any) -> dict[str, Any]:
    """Trains by two steps, each with a table of its own, on uneven batches."""
    keras.utils.set_random_seed(3)
    tables = [tf.Variable(tf.random.normal([rows, 8], dtype=tf.float64)) for rows in (500, 40)]
    kernel = tf.Variable(tf.random.normal([8, 3], dtype=tf.float64))
    wrapped = tf.function if ad is None else ad.function(batch="global")

    def step_of(table: tf.Variable) -> Any:
        optimizer = keras.optimizers.Adagrad(0.1)
        optimizer.build([table, kernel])

        @wrapped
        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.gather(table, ids) @ kernel))
            gradients = tape.gradient(loss, [table, kernel])
            optimizer.apply_gradients(zip(gradients, [table, kernel], strict=True))
            return loss

        return step

    steps = [step_of(table) for table in tables]
    ids = np.random.default_rng(1).integers(0, 40, 9).astype("int32")
    losses = [float(step(ids[:count])) for count in (9, 9, 5) for step in steps]
    read = {f"table_{k}": table.numpy() for k, table in enumerate(tables)}
    return read | {"losses": np.asarray(losses), "kernel": kernel.numpy()}


SCRIPT = """
from typing import Any
import keras
{source}
keras.config.set_floatx("float64")
with ad.scope():
    keep(**train(ad))
"""


@pytest.fixture
def expected() -> Iterator[dict[str, Any]]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield train(None)
    keras.config.set_floatx(before)


def test_a_chosen_strategy_has_the_numbers_of_one_device(tmp_path: Path, expected: dict[str, Any]) -> None:
    script, saved = SCRIPT.format(source=inspect.getsource(train)), tmp_path / "chosen.yml"
    spec = {"nodes": NODES, "strategy": {"builder": "Auto", "save_as": str(saved)}, "xla": "auto"}
    with Training(tmp_path / "run", script, spec) as run:
        assert run.wait(240) == 0, run.stderr
        run.assert_gone()
        run.assert_kept(2, expected)
    assert "measured a step in" in run.stderr
    assert "measured the step with and without XLA in" in run.stderr
    assert run.stderr.count("xla: auto compiles ") == 2
    assert "Auto chooses " in run.stderr
    measured = json.loads((tmp_path / "run" / "cluster.measured.json").read_text())
    assert [machine["workers"] for machine in measured["machines"]] == [2]
    section = yaml.safe_load(saved.read_text())["strategy"]
    assert len(section["variables"]) == 2  # of the first step


DIFFERENT = """
with ad.scope():
    variable = tf.Variable([1.0, 2.0, 3.0])
    step = training(variable) if me == 0 else ad.function(lambda x: tf.reduce_sum(x * variable))
    step(np.ones([4, 3], np.float32))
"""


def test_workers_with_different_steps_do_not_wait_for_each_others_measurement(tmp_path: Path) -> None:
    with Training(tmp_path / "run", DIFFERENT, {"nodes": NODES, "strategy": "Auto"}) as run:
        assert run.wait(120) == 1
        run.assert_gone()
    assert "CaptureMismatchError" in run.stderr, run.stderr
    assert "measured a step in" not in run.stderr


FIT = """
import keras
keras.utils.set_random_seed(3)
with ad.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(2).normal(size=(11, 4)).astype("float32")
    for _ in range({fits}):
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
"""


def test_a_resumed_run_keeps_the_choice(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    spec = {"nodes": NODES, "strategy": "Auto", "checkpoint": {"folder": str(folder), "every_steps": 1}, "xla": "auto"}
    for fits, measures in ((1, True), (2, False)):
        with Training(tmp_path / str(fits), FIT.format(fits=fits), spec) as run:
            assert run.wait(240) == 0, run.stderr
            run.assert_gone()
        assert ("measured a step in" in run.stderr) is measures, run.stderr
        assert ("xla: auto compiles " in run.stderr) is measures, run.stderr
        assert "Auto chooses " in run.stderr
        prefix = Folder(str(folder)).latest()
        assert prefix is not None
        assert len(read_about(prefix)[CHOICES]) == 1
