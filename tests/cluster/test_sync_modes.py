"""Workers of different speeds under parameter servers: the waits of each sync mode, and the trained values."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START, STEPS, STALENESS = 60.0, 5, 2

# The test holds the last worker. The loss is linear, so that gradients do not depend on the workers' progress.
TRAIN = f"""
STEPS = {STEPS}
slow = ad.num_workers - 1

def train(name, staleness):
    with ad.scope():
        kernel = tf.Variable(np.zeros(3), name=name)
        step = training(kernel)
    # All prepare the step together; the first one changes nothing.
    for number in range(STEPS + 1):
        if me == slow and number:
            wait_for(f"{{name}}: may {{number}}")
            note(f"{{name}}: slow starts {{number}}")
        step(np.full([2 + me, 3], number * (me + 1.0)))
        if me != slow and staleness is not None and number > staleness:  # a note precedes its step
            assert has_note(f"{{name}}: slow starts {{number - staleness}}"), f"{{name}}: {{number}} is too far ahead"
        note(f"{{name}}: worker {{me}} ended {{number}}")
    return kernel
"""


def local(strategy: dict[str, object], workers: int = 2) -> dict[str, object]:
    node = {"address": "localhost", "cpus": list(range(workers)), "workers": workers}
    return {"nodes": [node], "strategy": strategy}


def mean_of_all(workers: int = 2) -> np.ndarray:
    """Returns the kernel after synchronous updates: each worker's gradient is `number · (me + 1)`."""
    sizes = np.array([2 + w for w in range(workers)])
    mean = (sizes * np.arange(1, workers + 1)).sum() / sizes.sum()
    return np.full(3, -0.5 * mean * sum(range(1, STEPS + 1)))


def each_by_itself(workers: int = 2) -> np.ndarray:
    """Returns the kernel after asynchronous updates."""
    return np.full(3, -0.5 * sum(range(1, workers + 1)) * sum(range(1, STEPS + 1)))


# One run for all variables, since its start takes longer than their steps.
BY_VARIABLE = {
    "synchronous": {"owner": 0, "staleness": STALENESS},
    "asynchronous": {"owner": 1, "sync": False, "staleness": STALENESS},
    "unbounded": {"owner": 1, "sync": False, "local_proxy_variable": True},
    "of_session": {"owner": 1, "staleness": STALENESS, "local_proxy_variable": True},
}
BUILDER = f"""
from dataclasses import dataclass
from autodist.strategies import PS, StrategyBuilder, synced_variables

@dataclass(frozen=True)
class ByVariable(StrategyBuilder):
    def build(self, graph_item, resource_spec):
        (variable,) = synced_variables(graph_item)
        options = {BY_VARIABLE}.get(variable.name, {{"sync": False}})
        return PS(**options).build(graph_item, resource_spec)
"""
PACED = (
    TRAIN
    + f"""
import keras

kernels = {{name: train(name, staleness) for name, staleness in
           (("synchronous", {STALENESS}), ("asynchronous", {STALENESS}), ("unbounded", None))}}
kept = {{name: kernel.numpy() for name, kernel in kernels.items()}}
ad.reduce(0)
kept |= {{f"{{name}}, all": kernel.numpy() for name, kernel in kernels.items()}}

class SlowAtLast(keras.callbacks.Callback):  # makes its last step when the chief has made all of its own
    def on_train_batch_begin(self, batch, logs=None):
        if me == slow and batch == STEPS - 1:
            wait_for("fit: the chief's epoch is over")
    def on_epoch_end(self, epoch, logs=None):
        if me == 0:
            note("fit: the chief's epoch is over")
    def on_train_end(self, logs=None):
        kept["fit, in a callback"] = self.model.get_weights()[0]

with ad.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.5), lambda y, z: z)
model.fit(np.ones([6 * STEPS, 3]), np.ones([6 * STEPS, 1]), batch_size=6, verbose=0, callbacks=[SlowAtLast()])
kept["fit"] = model.get_weights()[0]
with tf.Graph().as_default(), ad.scope():
    x = tf.compat.v1.placeholder(tf.float64, [None, 3])
    rate = tf.compat.v1.placeholder(tf.float64, [])
    kernel = tf.compat.v1.get_variable("of_session", [3], tf.float64, tf.compat.v1.zeros_initializer())
    train = tf.compat.v1.train.GradientDescentOptimizer(rate).minimize(tf.reduce_mean(tf.reduce_sum(x * kernel, 1)))
    session = ad.create_distributed_session()
    session.run(tf.compat.v1.global_variables_initializer())
    for number in range(1, STEPS + 1):
        session.run(train, {{x: np.full([2 + me, 3], number * (me + 1.0)), rate: 0.5}})
    kept["of_session"] = session.run(kernel)
keep(**kept)
"""
)


def test_workers_get_ahead_of_a_slow_one_by_the_staleness_or_freely_and_what_is_read_between_steps_has_all_updates(
    tmp_path: Path,
) -> None:
    (tmp_path / "beside.py").write_text(BUILDER)
    with Training(tmp_path, PACED, local({"builder": "beside.ByVariable"}, 3)) as run:
        for name in ("synchronous", "asynchronous"):
            for worker in (0, 1):
                run.wait_for_note(f"{name}: worker {worker} ended {STALENESS}", START)
            assert not run.has_note(f"{name}: slow starts 1")
            for number in range(1, STEPS + 1):
                for worker in (0, 1):
                    run.wait_for_note(f"{name}: worker {worker} ended {min(number - 1 + STALENESS, STEPS)}")
                run.note(f"{name}: may {number}")
        for worker in (0, 1):
            run.wait_for_note(f"unbounded: worker {worker} ended {STEPS}", START)
        assert not run.has_note("unbounded: slow starts 1")
        for number in range(1, STEPS + 1):
            run.note(f"unbounded: may {number}")
        assert run.wait(30) == 0, run.stderr
        run.assert_gone()
    for worker in range(3):
        kept = run.kept(worker)
        for name in ("synchronous", "of_session"):  # the last update is there before a value is read
            np.testing.assert_allclose(kept[name], mean_of_all(3), rtol=1e-12, err_msg=f"{name} of {worker}")
        for name in ("fit", "fit, in a callback"):  # each worker's gradient is 1, and an update of its own
            np.testing.assert_array_equal(kept[name], np.full([3, 1], -0.5 * 3 * STEPS), err_msg=f"{name} of {worker}")
        for name in ("asynchronous", "unbounded"):
            np.testing.assert_allclose(
                kept[f"{name}, all"], each_by_itself(3), rtol=1e-12, err_msg=f"{name} of {worker}"
            )
    for name in ("asynchronous", "unbounded"):
        np.testing.assert_allclose(run.kept(2)[name], each_by_itself(3), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(("owner", "sync"), [(0, True), (1, True), (1, False)])
def test_a_worker_killed_while_updates_wait_for_it_ends_the_run(tmp_path: Path, owner: int, sync: bool) -> None:
    options = {"builder": "PS", "owner": owner, "staleness": STALENESS, "sync": sync}
    with Training(tmp_path, f"{TRAIN}\ntrain('kernel', {STALENESS})\n", local(options)) as run:
        run.wait_for_note(f"kernel: worker 0 ended {STALENESS}", START)
        began = time.monotonic()
        os.kill(run.wait_for_note("worker1"), signal.SIGKILL)
        assert run.wait(10) != 0
        run.assert_gone(10 - (time.monotonic() - began))
    assert "localhost:1 was ended by SIGKILL" in run.stderr


FAILS = """
with ad.scope():
    kernel = tf.Variable(np.zeros(3), name="kernel")

    @ad.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * kernel)
        kernel.assign_sub(tf.debugging.check_numerics(tape.gradient(loss, kernel), "the update is no number"))

for number in range(20):
    step(np.full([2, 3], np.nan if number == 2 else 1.0))
"""


@pytest.mark.parametrize("owner", [0, 1])
def test_an_update_that_fails_beside_the_steps_ends_the_run(tmp_path: Path, owner: int) -> None:
    options = {"builder": "PS", "owner": owner, "staleness": STALENESS}
    with Training(tmp_path, FAILS, local(options)) as run:
        assert run.wait(START) != 0
        run.assert_gone()
    assert "an update of variables owned by this worker failed: InvalidArgumentError" in run.stderr
    assert "the update is no number" in run.stderr


def test_an_asynchronous_update_that_fails_is_an_error_of_the_step_whose_gradient_it_applies(tmp_path: Path) -> None:
    with Training(tmp_path, FAILS, local({"builder": "PS", "owner": 1, "sync": False})) as run:
        assert run.wait(START) != 0
        run.assert_gone()
    assert "InvalidArgumentError" in run.stderr
    assert "the update is no number" in run.stderr


UNEQUAL = """
with ad.scope():
    kernel = tf.Variable(np.zeros(3), name="kernel")
    step = training(kernel)

for number in range(2 + 6 * me):
    step(np.ones([2 + me, 3]))
note(f"worker {me} has trained")
if me != ad.num_workers - 1:
    wait_for(f"worker {ad.num_workers - 1} has trained")
ad.reduce(0)
keep(kernel=kernel.numpy())
"""


def test_workers_make_different_numbers_of_asynchronous_steps(tmp_path: Path) -> None:
    with Training(tmp_path, UNEQUAL, local({"builder": "PSLoadBalancing", "sync": False}, 3)) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
    assert "cancelled" not in run.stderr
    for worker in range(3):
        np.testing.assert_array_equal(run.kept(worker)["kernel"], np.full(3, -0.5 * (2 + 8 + 14)))


SERVED = """
import keras

def batches():
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(8, 4)), rng.normal(size=(8, 1))) for _ in range(3)]

keras.utils.set_random_seed(3)
keras.config.set_floatx("float64")
with ad.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.BatchNormalization(),
                              keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
history = model.fit(*map(np.concatenate, zip(*batches())), batch_size=8, epochs=2, shuffle=False, verbose=0)

with ad.scope():
    kernel = tf.Variable(np.ones([4, 1]), name="kernel")

    @ad.function(batch="global")
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ kernel - y))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

losses = [float(step(x, y)) for x, y in batches()]

with tf.Graph().as_default(), ad.scope():
    x, y = (tf.compat.v1.placeholder(tf.float64, [None, n]) for n in (4, 1))
    v = tf.compat.v1.get_variable("v", [4, 1], tf.float64, tf.compat.v1.ones_initializer())
    loss = tf.reduce_mean(tf.square(x @ v - y))
    train = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    session = ad.create_distributed_session()
    session.run(tf.compat.v1.global_variables_initializer())
    feeding = min(ad.num_workers, 2)
    for batch in batches():
        part = [np.array_split(rows, feeding)[me] if me < feeding else rows for rows in batch]  # a server's is not used
        session.run([loss, train], dict(zip((x, y), part)))
    trained = session.run(v)

keep(kernel=kernel.numpy(), losses=losses, session=trained, logs=history.history["loss"] + history.history["mae"],
     **{f"model{k}": value for k, value in enumerate(model.get_weights()) if k not in (4, 5)})
"""


def test_a_node_without_replicas_owns_what_the_others_train(tmp_path: Path) -> None:
    nodes = [
        {"address": "127.0.0.1", "chief": True, "cpus": [0, 1], "workers": 2},
        {"address": "127.0.0.2", "cpus": []},
    ]
    strategy = {"builder": "PS", "owner": 2}
    with Training(tmp_path / "served", SERVED, {"nodes": nodes, "strategy": strategy}) as run:
        assert run.wait(90) == 0, run.stderr
        run.assert_gone()
    with Training(tmp_path / "alone", SERVED, {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}) as alone:
        assert alone.wait(90) == 0, alone.stderr
    expected = alone.kept(0)
    for worker in range(3):
        found = run.kept(worker)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=f"{name} of {worker}")


SURVIVES = """
with ad.scope():
    kernel = tf.Variable(np.zeros(3), name="kernel")

    @ad.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * kernel, 1) - y)
        kernel.assign_sub(0.5 * tape.gradient(loss, kernel))

for number in range(4):
    try:
        step(np.ones([2, 3]), np.ones(3 if me == failing and number == 1 else 2))
    except Exception as error:
        print(me, number, type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("failing", "reported"),
    [
        (0, "the chief failed in a step (autodist.errors.UnevenBatchError: the inputs of step have different"),
        (1, "localhost:1 failed in a step (autodist.errors.UnevenBatchError: the inputs of step have different"),
    ],
)
def test_a_script_that_survives_the_failure_of_a_step_ends_the_run(tmp_path: Path, failing: int, reported: str) -> None:
    with Training(tmp_path, f"failing = {failing}\n" + SURVIVES, local({"builder": "AllReduce"})) as run:
        assert run.wait(START) != 0
        run.assert_gone()
    assert reported in run.stderr
    assert f"{failing} 1 UnevenBatchError" in run.stdout
    assert "its script went on" in run.stderr
    if failing == 0:  # another worker may be ended before it prints what it has caught
        assert "0 2 ClusterError this worker failed in an earlier step (UnevenBatchError" in run.stdout
