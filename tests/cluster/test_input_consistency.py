"""The input consistency check at the first step: no worker waits, and the run continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPEC = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

FIT = """
import keras
x = np.random.default_rng().normal(size=(12, 3))  # unseeded
with ad.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
"""

STEP = """
with ad.scope():
    step = training(tf.Variable(np.zeros(3), name="kernel"))
for number in range(3):
    step(np.ones([4, 3]))
"""

SESSION = """
v1 = tf.compat.v1
with tf.Graph().as_default(), ad.scope():
    x, rate = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.float32, [], "rate")
    loss = tf.reduce_mean((x @ v1.get_variable("v", [3, 1])) ** 2)
    train = v1.train.GradientDescentOptimizer(rate).minimize(loss)
    session = ad.create_distributed_session()
    session.run(v1.global_variables_initializer())
    for number in range(3):
        fetches = [train, loss] if me else train
        session.run(fetches, {x: np.full([4, 3], me + 1.0), rate: 0.1 + me})
"""


@pytest.mark.parametrize(
    "script, reported",
    [
        (FIT, "the workers feed different data, but all must feed the same global batch: x of localhost:1"),
        (STEP, "localhost:0 and localhost:1 feed the same examples"),
        (SESSION, "the workers pass different values, but all must pass the same"),
    ],
    ids=["fit", "step", "session"],
)
def test_the_chief_reports_who_feeds_other_data_than_is_meant(tmp_path: Path, script: str, reported: str):
    with Training(tmp_path, script, SPEC) as run:
        assert run.wait(120) == 0, run.stderr
        assert run.stderr.count(reported) == 1, run.stderr
        run.assert_gone()
