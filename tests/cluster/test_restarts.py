"""Runs that lose a worker restart automatically, from the last checkpoint or from the beginning."""

from __future__ import annotations

import os
import re
import secrets
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.hosts import LoopbackHosts
from tests.cluster.runs import MARK
from tests.cluster.test_encryption import forwarding_to
from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START = 60.0

SERVED = {
    "nodes": [
        {"address": "127.0.0.1", "chief": True, "cpus": [0, 1], "workers": 2},
        {"address": "127.0.0.2", "cpus": []},
    ],
    "strategy": {"builder": "PS", "owner": 2},
    "max_restarts": 3,
}

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "max_restarts": 3}

OWN, GLOBAL = 'batches = "own"', 'batches = "global"'

# Each start leaves its mark; steps' batches are drawn from their numbers. What is trained without a failure, in the
# last start, is what the other variable has to come to.
TRAIN = """
start = next(n for n in range(9) if not has_note(f"start{n}.{me}"))
note(f"start{start}.{me}")
atexit.register(lambda: note(f"left{start}.{me}"))

def dies(at):
    if has_note(f"dies{start}.{me}.{at}"):
        os.kill(os.getpid(), signal.SIGKILL)

with ad.scope():
    variable = tf.Variable(np.full(3, 0.1), name="variable")
    beside = tf.Variable(np.full(3, 0.1), name="beside")

def made(variable):
    @ad.function(batch="per_worker" if batches == "own" else "global")
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.sin(x * variable), 1))
        variable.assign_sub(0.3 * tape.gradient(loss, variable))
        return loss
    return step

def batch(number):
    return np.random.default_rng([number, me if batches == "own" else 0]).normal(size=[2, 3])

checkpoint = ad.checkpoint(os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints"), variable=variable)
dies("start")
done = checkpoint.restore() or 0
note(f"from{start}.{done}")
step = made(variable)
for number in range(done, 7):
    dies(number)
    step(batch(number))
    if number % 2:
        checkpoint.save(step=number + 1)
"""


def test_all_start_again_where_a_worker_or_a_server_is_killed_and_come_to_the_values_of_a_run_that_lost_none(
    tmp_path: Path,
) -> None:
    script = """
step = made(beside)
for number in range(7):
    step(batch(number))
if me == 0:
    keep(values=variable.numpy(), expected=beside.numpy(), pid=os.getpid(), seed=ad._run.seed)
"""
    with Training(tmp_path, OWN + TRAIN + script, SERVED) as run:
        run.note("dies0.2.5")
        run.note("dies1.1.start")
        assert run.wait(3 * START) == 0, run.stderr
        run.assert_gone(0)
        kept, chief = run.kept(0), run.chief.pid
        np.testing.assert_array_equal(kept["values"], kept["expected"])
        assert kept["pid"] == chief
        assert [run.has_note(f"from{start}.{done}") for start, done in ((0, 0), (2, 4))] == [True, True]
        assert run.has_note("left0.0") and run.has_note("left2.1")
    said = [line for line in run.stderr.splitlines() if "start again" in line]
    assert len(said) == 2, run.stderr
    # The server is done with a step before the chief is.
    assert re.search(
        r"all workers start again from the checkpoint of step 4 \(restart 1 of 3, in 0 s\), since in step [56] "
        r"127\.0\.0\.2 was ended by SIGKILL\.$",
        said[0],
    )
    assert said[1].endswith(
        "from the checkpoint of step 4 (restart 2 of 3, in 2 s), since before the first step 127.0.0.1:1 was ended by "
        "SIGKILL."
    )


def test_a_script_that_raises_on_one_worker_each_time_is_not_tried_a_third_time(tmp_path: Path) -> None:
    script = "if me == 1: raise ValueError(f'of {me}')\nstep(batch(7))"
    with Training(tmp_path, OWN + TRAIN + script, TWO) as run:
        assert run.wait(3 * START) == 1
        run.assert_gone()
        assert run.has_note("start1.1") and not run.has_note("start2.0")
    assert run.stderr.count("start again from the checkpoint of step 6 (restart 1 of 3") == 1, run.stderr
    assert "not started again: it has failed so in step 8 twice in a row" in run.stderr
    assert "ValueError: of 1" in run.stderr


@pytest.mark.ssh
def test_a_machine_whose_sshd_was_killed_and_stays_away_is_left_out_and_one_device_s_values_stay(
    tmp_path: Path,
) -> None:
    script = """
step = made(beside)
for number in range(7):
    step(batch(number))
keep(values=variable.numpy(), expected=beside.numpy(), replicas=ad.num_replicas)
"""
    # The worker kills its machine's sshd, and waits for the result.
    dies = "if me == 1 and number == 5: note('at'); wait_for('never', 600)\n    step(batch(number))\n    if"
    train = GLOBAL + TRAIN.replace("step(batch(number))\n    if", dies)
    (tmp_path / "hosts").mkdir()
    mark = secrets.token_hex(8)
    with LoopbackHosts(tmp_path / "hosts", 1, {MARK: mark, "CUDA_VISIBLE_DEVICES": "-1"}) as hosts:
        spec = hosts.spec(cpus=[0]) | {"max_restarts": 1, "min_nodes": 1, "connect_timeout": 2, "silence_timeout": 4}
        (tmp_path / "run").mkdir()
        with Training(tmp_path / "run", train + script, spec, mark=mark) as run:
            run.wait_for_note("at", START)
            hosts.stop(hosts.hosts[0])
            assert run.wait(3 * START) == 0, run.stderr
            run.assert_gone()
            kept = run.kept(0)
    assert kept["replicas"] == 1
    np.testing.assert_allclose(kept["values"], kept["expected"], rtol=1e-14)
    address = hosts.hosts[0].address
    assert f"restart 1 of 1, in 1 s), since in step 6 {address} was lost: " in run.stderr, run.stderr
    assert f"{address} is left out (`min_nodes` is 1), and the run starts from the checkpoint of step 4 on 1 node" in (
        run.stderr
    )


@pytest.mark.ssh
def test_all_start_again_where_the_connection_that_carries_encrypted_traffic_breaks(tmp_path: Path) -> None:
    script = """
step = made(beside)
for number in range(7):
    step(batch(number))
keep(values=variable.numpy(), expected=beside.numpy(), replicas=ad.num_replicas)
"""
    waits = (
        "if me == 1 and number == 5 and not start: note('at'); wait_for('never', 600)\n    step(batch(number))\n    if"
    )
    train = GLOBAL + TRAIN.replace("step(batch(number))\n    if", waits)
    (tmp_path / "hosts").mkdir()
    mark = secrets.token_hex(8)
    with LoopbackHosts(tmp_path / "hosts", 1, {MARK: mark, "CUDA_VISIBLE_DEVICES": "-1"}) as hosts:
        spec = hosts.spec(cpus=[0]) | {"max_restarts": 1, "encrypt": "ssh", "transport": "openssh"}
        (tmp_path / "run").mkdir()
        with Training(tmp_path / "run", train + script, spec, mark=mark) as run:
            run.wait_for_note("at", START)
            os.kill(forwarding_to(run, hosts.hosts[0].address), signal.SIGKILL)
            assert run.wait(3 * START) == 0, run.stderr
            run.assert_gone()
            kept = run.kept(0)
    assert kept["replicas"] == 2
    np.testing.assert_allclose(kept["values"], kept["expected"], rtol=1e-14)
    assert "restart 1 of 1, in 1 s)" in run.stderr and "carries its traffic broke" in run.stderr, run.stderr


FIT = """
import keras

def dies(batch, logs):
    if me == 1 and has_note("dies") and not has_note("died") and ad.steps_done == 7:
        note("died")
        os.kill(os.getpid(), signal.SIGKILL)

keras.utils.set_random_seed(5)
rng = np.random.default_rng(1)
x, y = rng.normal(size=(32, 4)), rng.normal(size=(32, 1))
with ad.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.4),
                              keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
callbacks = [keras.callbacks.LambdaCallback(on_train_batch_begin=dies)]
history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
keep(losses=history.history["loss"], **{f"weights{n}": values for n, values in enumerate(model.get_weights())})
"""


def test_a_fit_that_loses_a_worker_comes_to_the_values_of_one_that_does_not_with_no_line_of_the_script(
    tmp_path: Path,
) -> None:
    kept = []
    for name in ("whole", "loses"):
        section = {"folder": str(tmp_path / name / "checkpoints"), "every_steps": 3}
        spec = {**TWO, "checkpoint": section}
        with Training(tmp_path / name, FIT, spec) as run:
            if name == "loses":
                run.note("dies")
            assert run.wait(3 * START) == 0, run.stderr
            run.assert_gone()
            kept.append(run.kept(0))
            reported = run.stderr
    assert (
        "from the checkpoint of step 6 (restart 1 of 3, in 0 s), since in step 8 localhost:1 was ended by" in reported
    )
    assert kept[0].keys() == kept[1].keys()
    for name, values in kept[0].items():
        np.testing.assert_array_equal(kept[1][name], values, err_msg=name)
