"""Rejected steps: if all workers reject one, the run continues; if only one does, the run ends for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.runs import within
from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

START = 60.0

SCRIPT = """
from autodist.errors import CaptureError
with ad.scope():
    weight = tf.Variable(np.zeros(3))
    step = training(weight)

    @ad.function
    def refused(x):
        raise {error}("this step is refused")

    step(np.ones((2, 3)))
    for _ in range(2):
        try:
            if {refuses}:
                refused(np.ones((2, 3)))
            else:
                step(np.ones((2, 3)))
        except Exception as error:
            print("caught", type(error).__name__)
    step(np.ones((2, 3)))
    keep(weight=weight.numpy())
"""


@pytest.mark.parametrize("builder, error", [("AllReduce", "CaptureError"), ("PS", "ValueError")])
def test_after_a_refusal_that_all_workers_meet_the_run_goes_on(tmp_path: Path, builder: str, error: str) -> None:
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    spec = {"nodes": nodes, "strategy": {"builder": builder}}
    with Training(tmp_path, SCRIPT.format(refuses="True", error=error), spec) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        for worker in range(2):
            np.testing.assert_allclose(run.kept(worker)["weight"], np.full(3, -1.0), rtol=1e-12)
    assert run.stdout.count(f"caught {error}") == 4


@pytest.mark.parametrize("worker, error", [(0, "ValueError"), (1, "CaptureError")])
def test_a_refusal_that_one_worker_joins_ends_all_at_once_with_its_cause(
    tmp_path: Path, worker: int, error: str
) -> None:
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}
    with Training(tmp_path, SCRIPT.format(refuses=f"me == {worker}", error=error), spec) as run:
        assert run.wait(START) != 0
        run.assert_gone()
    assert f"{error}: " in run.stderr and "this step is refused" in run.stderr


SLEEPS = """
import keras
from autodist.errors import CaptureError
with ad.scope():
    weight = tf.Variable(np.zeros(3))
    step = training(weight)

    @ad.function
    def refused(x):
        raise CaptureError("this step is refused")

    @ad.function
    def compares(x):
        with tf.GradientTape() as tape:
            found = x * weight
            loss = tf.reduce_mean(tf.matmul(found, found, transpose_b=True) * tf.random.uniform((), dtype=tf.float64))
        weight.assign_sub(0.5 * tape.gradient(loss, weight))

    def fit(targets):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 3)), np.ones((targets, 1)), batch_size=8, verbose=0)

    def runs(*sizes):
        v1 = tf.compat.v1
        with tf.Graph().as_default(), ad.scope():
            x = v1.placeholder(tf.float64, [None, 3])
            found = x * v1.get_variable("weight", initializer=np.ones(3), use_resource=True)
            loss = tf.reduce_mean(tf.matmul(found, found, transpose_b=True))
            train = v1.train.GradientDescentOptimizer(0.5).minimize(loss)
            session = ad.create_distributed_session()
            session.run(v1.global_variables_initializer())
            for size in (4, *sizes):
                session.run(train, {{x: np.ones((size, 3))}})

    step(np.ones((2, 3)))
    compares(np.ones((4, 3)))
    try:
        {call}
    except Exception:
        if me != {worker}:
            raise
        wait_for("the others have ended", 600)
"""

# Rejections by one worker: before, during and after the capture of the step, and in `fit`.
CALLS = {
    "in a step": ("refused(np.ones((2, 3))) if me == {worker} else step(np.ones((2, 3)))", "this step is refused"),
    "by its arguments": ("step(*[np.ones((2, 3))] * (2 if me == {worker} else 1))", "too many positional arguments"),
    "in fit": ("fit(4 if me == {worker} else 8)", "Data cardinality is ambiguous"),
    "by its part in a session": ("runs(3 if me == {worker} else 4)", "does not divide evenly among 2 replicas"),
    "by its part": ("compares(np.ones((3 if me == {worker} else 4, 3)))", "does not divide evenly among 2 replicas"),
}


@pytest.mark.parametrize(
    ("call", "worker", "builder"),
    [
        ("in fit", 1, "AllReduce"),
        ("by its part in a session", 0, "PS"),
        ("in a step", 1, "PS"),
        ("by its arguments", 0, "AllReduce"),
        ("by its part", 1, "PS"),
    ],
)
def test_a_script_that_survives_a_refusal_of_its_own_and_makes_no_other_step_keeps_nobody_waiting(
    tmp_path: Path, call: str, worker: int, builder: str
) -> None:
    nodes = [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 2}]
    spec = {"nodes": nodes, "strategy": {"builder": builder}, "cause_timeout": 1}
    made, cause = CALLS[call]
    script = SLEEPS.format(call=made.format(worker=worker), worker=worker)
    with Training(tmp_path, script, spec) as run:
        assert within(START, lambda: "and its script went on" in run.stderr), run.stderr
        run.note("the others have ended")
        assert run.wait(START) != 0
        run.assert_gone()
    assert cause in run.stderr


REFUSED_BY_CHIEF = """
from autodist.errors import StrategyError
from autodist.strategies import AllReduce

built = AllReduce.build

def build(self, item, spec):
    if len(item.variables) > 1:
        raise StrategyError("two are too many")
    return built(self, item, spec)

AllReduce.build = build

with ad.scope():
    weight, other = tf.Variable(np.zeros(3)), tf.Variable(np.zeros(3))
    step = training(weight)

    @ad.function
    def refused(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight * other)
        weight.assign_sub(tape.gradient(loss, weight))

    for _ in range(2):
        step(np.ones((2, 3)))
        try:
            refused(np.ones((2, 3)))
        except StrategyError as error:
            print("caught", error)
    keep(weight=weight.numpy())
"""


def test_a_strategy_that_the_chief_refuses_is_refused_on_all_workers_and_the_run_goes_on(tmp_path: Path) -> None:
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}
    with Training(tmp_path, REFUSED_BY_CHIEF, spec) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        for worker in range(2):
            np.testing.assert_allclose(run.kept(worker)["weight"], np.full(3, -1.0), rtol=1e-12)
    assert run.stdout.count("caught two are too many") == 4
