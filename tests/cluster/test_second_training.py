"""Local training next to a distributed step is reported on two workers if the script reads its worker index."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPEC = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "strategy": {"builder": "PS"}}

SCRIPT = """
import keras
v1 = tf.compat.v1
X = np.ones((4, 3), "float32")[me::2]

class Pair:
    def __init__(self, ad):
        with ad.scope():
            self.first, self.second = (tf.Variable(tf.zeros([3]), name=name) for name in ("first", "second"))
            self.optimizer = keras.optimizers.SGD(0.1)
        self.step = training(self.first)

    def train(self):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((X @ self.second[:, None] - 1.0) ** 2)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.second), self.second)])

def in_a_function(ad, pair):
    return tf.function(pair.train)

def eagerly(ad, pair):
    return pair.train

def in_a_session(ad, pair):
    with tf.Graph().as_default(), ad.scope():
        x, v = v1.placeholder(tf.float32, [None, 3]), v1.get_variable("in_graph", [3, 1])
        train = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean((x @ v) ** 2))
        session = v1.Session()
        session.run(v1.global_variables_initializer())
    return lambda: session.run(train, {x: X})

pair = Pair(ad)
besides = [make(ad, pair) for make in (in_a_function, eagerly, in_a_session)]
for _ in range(3):
    pair.step(X)
    for beside in besides:
        beside()
"""


def test_a_function_an_eager_optimizer_and_a_session_that_train_beside_a_step_are_each_told_once_by_the_chief(
    tmp_path: Path,
) -> None:
    with Training(tmp_path, SCRIPT, SPEC) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
    reported = [line for line in run.stderr.splitlines() if "in addition to the steps that are distributed" in line]
    assert len(reported) == 3, run.stderr
    assert not any("localhost:1" in line for line in reported)
    functions = [line for line in reported if "a training step that is no @ad.function (train.py:" in line]
    (session,) = (
        line for line in reported if "a session that ad.create_distributed_session() did not make (train.py:" in line
    )
    assert ["trains second on each worker separately, on the data" in line for line in functions] == [True, True]
    assert "trains in_graph on each worker separately, on the data that it passes there" in session
    assert len({line.partition("(")[2].partition(")")[0] for line in reported}) == 3
