"""Scripts that request two workers: models built in the scope train on both; training on one device is reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

MODEL = """
import keras
X = np.random.default_rng(1).normal(size=(16, 4))
Y = X @ np.ones((4, 1))

def build():
    keras.utils.set_random_seed(3)
    keras.config.set_floatx("float64")
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])

def train(model):
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
"""

BUILT_IN_THE_SCOPE = """
with ad.scope():
    model = build()
train(model)
alone = build()
train(alone)
keep(**{f"both{n}": value for n, value in enumerate(model.get_weights())},
     **{f"alone{n}": value for n, value in enumerate(alone.get_weights())})
"""


@pytest.mark.slow
def test_a_model_of_the_scope_that_is_compiled_and_fitted_after_it_trains_on_both(tmp_path: Path) -> None:
    with Training(tmp_path, MODEL + BUILT_IN_THE_SCOPE, TWO) as run:
        assert run.wait(90) == 0, run.stderr
        run.assert_gone()
    for worker in (0, 1):
        kept = run.kept(worker)
        assert len(kept) == 8
        for number in range(4):
            np.testing.assert_allclose(kept[f"both{number}"], kept[f"alone{number}"], rtol=1e-9)
    assert "AllReduce: 2 replicas on 2 workers" in run.stderr
    assert "No training step was distributed" not in run.stderr


def test_a_script_without_a_scope_is_reported_at_its_end_and_ends_well(tmp_path: Path) -> None:
    with Training(tmp_path, MODEL + "train(build())\nprint('done', flush=True)", TWO) as run:
        assert run.wait(60) == 0, run.stderr
        run.assert_gone()
    assert "done" in run.stdout.splitlines()  # possibly of the other worker, too
    reported = [line for line in run.stderr.splitlines() if "No training step was distributed" in line]
    assert len(reported) == 1
    assert "2 replicas on 2 workers" in reported[0]
    assert "Build the model in `with ad.scope():`" in reported[0]


PLAIN_SESSION = """
with tf.Graph().as_default(), ad.scope():
    x = tf.compat.v1.placeholder(tf.float64, [None, 3])
    kernel = tf.compat.v1.get_variable("kernel", [3], tf.float64)
    loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * kernel, 1)))
    train = tf.compat.v1.train.AdamOptimizer().minimize(loss)
    with tf.compat.v1.train.MonitoredTrainingSession() as session:
        session.run(train, {x: np.ones([8, 3])[me::ad.num_workers]})
"""


@pytest.mark.feature(
    "session", "step: `MonitoredTrainingSession` or `Session`, fed a part of the data", refused="CaptureError"
)
def test_a_plain_session_that_would_train_on_half_of_each_batch_is_refused(tmp_path: Path) -> None:
    with Training(tmp_path, PLAIN_SESSION, TWO) as run:
        assert run.wait(60) == 1, run.stderr
        run.assert_gone()
    assert "CaptureError" in run.stderr
    assert "ad.create_distributed_session()" in run.stderr
    assert "No training step was distributed" not in run.stderr  # the error stands alone
