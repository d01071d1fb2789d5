"""Variable writes by one worker's script between steps: the chief's values reach all workers without a deadlock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TRAIN = """
with ad.scope():
    kernel, other = tf.Variable(np.zeros(3), name="kernel"), tf.Variable(1.0, name="other")
    step = training(kernel)
    checkpoint = tf.train.Checkpoint(kernel=kernel)

def train():  # each makes the kernel 0.5 less
    return float(step(np.full([2 + me, 3], 1.0)))
path = checkpoint.write(f"{os.path.dirname(__file__)}/saved{me}")
losses = [train(), train()]
"""

CHIEF = """
if ad.is_chief:
    checkpoint.read(path)
losses += [train(), train()]
keep(kernel=kernel.numpy(), losses=losses)
"""

OTHER = """
if not ad.is_chief:
    kernel[1].assign(7.0)
losses += [train(), train()]
keep(kernel=kernel.numpy(), losses=losses)
"""


@pytest.mark.parametrize(
    "builder, writes, kernel, losses",
    [
        ("PartitionedPS", CHIEF, -1.0, [0.0, -1.5, 0.0, -1.5]),
        ("AllReduce", OTHER, -2.0, [0.0, -1.5, -3.0, -4.5]),
    ],
)
def test_all_workers_go_on_from_the_chiefs_values(
    tmp_path: Path, builder: str, writes: str, kernel: float, losses: list[float]
):
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    options = {"min_partition_bytes": 1} if builder == "PartitionedPS" else {}
    with Training(tmp_path, TRAIN + writes, {"nodes": nodes, "strategy": {"builder": builder, **options}}) as run:
        assert run.wait(120) == 0, run.stderr
        for worker in range(2):
            np.testing.assert_allclose(run.kept(worker)["kernel"], np.full(3, kernel), atol=1e-12)
            np.testing.assert_allclose(run.kept(worker)["losses"], losses, atol=1e-12)
        reported = "has written kernel on this worker and not on the chief"
        assert (run.stderr + run.stdout).count(reported) == (1 if writes == OTHER else 0), run.stderr
        run.assert_gone()


METRICS = """
import keras
from autodist.runtime.write_consensus import WriteConsensus

waits, agree = [], WriteConsensus.agree
WriteConsensus.agree = lambda *args: (waits.append(1), agree(*args))[1]
x = np.arange(24.0).reshape(8, 3)

class ChiefWrites(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if ad.is_chief and epoch == 1:
            self.model.metrics[0].total.assign(1000.0)

with ad.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    losses = model.fit(x, x[:, :1] * 2, batch_size=4, verbose=0).history["loss"]
    started = len(waits)
    losses += model.fit(
        x, x[:, :1] * 2, batch_size=4, epochs=2, validation_data=(x, x[:, :1] * 2), verbose=0
    ).history["loss"]
    losses.append(model.evaluate(x, x[:, :1] * 2, batch_size=4, verbose=0)[0])
    losses.append(model.evaluate(x, x[:, :1] * 2, batch_size=4, verbose=0)[0])
    resets = len(waits) - started
    written = model.fit(x, x[:, :1] * 2, batch_size=4, epochs=2, callbacks=[ChiefWrites()], verbose=0).history["loss"]
keep(losses=losses, started=started, resets=resets, written=written, writes=len(waits) - started - resets)
"""


def test_no_worker_waits_for_values_after_keras_has_reset_the_metrics(tmp_path: Path):
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    with Training(tmp_path, METRICS, {"nodes": nodes, "strategy": {"builder": "AllReduce"}}) as run:
        assert run.wait(120) == 0, run.stderr
        chief, other = run.kept(0), run.kept(1)
        for kept in (chief, other):
            np.testing.assert_allclose(kept["losses"], np.full(5, kept["losses"][0]), rtol=1e-6)
            assert kept["started"] > 0 and kept["resets"] == 0
            first, second = kept["written"]
            assert kept["writes"] > 0 and abs(second - first - 1000 / 8) < 1e-3 * second
        np.testing.assert_array_equal(chief["written"], other["written"])
        run.assert_gone()


READS = """
from autodist.runtime.variable_slices import VariableSlices

pulled, pull = [], VariableSlices.pull
def names_of(behind):
    return " ".join(t.source.name.split("/")[-1].split(":")[0] for t in behind)

VariableSlices.pull = lambda slices, behind: (pulled.append(names_of(behind)), pull(slices, behind))[1]
with ad.scope():
    kernel, count = tf.Variable(np.zeros(3), name="kernel"), tf.Variable(0, name="count")
    optimizer = tf.keras.optimizers.SGD(0.5)
    optimizer.build([kernel])
    @ad.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * kernel, 1))
        optimizer.apply_gradients([(tape.gradient(loss, kernel), kernel)])
        count.assign_add(1)
        return loss
step(np.ones([2, 3]))
pulled.clear()
keep(counted=count.numpy(), kernel=kernel.numpy(), pulled=pulled)
"""


def test_reading_what_a_worker_holds_does_not_fetch_what_others_hold(tmp_path: Path):
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    with Training(tmp_path, READS, {"nodes": nodes, "strategy": {"builder": "PS"}}) as run:
        assert run.wait(120) == 0, run.stderr
        for worker in range(2):
            kept = run.kept(worker)
            assert kept["counted"] == 1
            np.testing.assert_allclose(kept["kernel"], np.full(3, -0.5), atol=1e-12)
        chief, other = run.kept(0)["pulled"], run.kept(1)["pulled"]  # the chief owns the kernel
        assert len(chief) == 1 and {"count", "kernel"} <= {*chief[0].split()}
        assert len(other) == 2 and "count" in other[0].split() and "kernel" not in other[0] and other[1] == "kernel"
        run.assert_gone()
