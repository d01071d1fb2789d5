"""Local steps with real processes, and a run that resumes between two outer steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

SPEC = {
    "nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}],
    "strategy": {"builder": "DiLoCo", "local_steps": 4},
    "max_restarts": 1,
}

# Worker 1 dies in step 7, after the save of step 6, between the outer steps 4 and 8. The script computes what two
# workers that train one after the other get.
SCRIPT = """
import keras

class Model:
    def __init__(self):
        self.kernel = tf.Variable(np.linspace(-1.0, 1.0, 6).reshape(3, 2), name="kernel")
        self.optimizer = keras.optimizers.Adam(0.05)
        self.optimizer.build([self.kernel])

    def train(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.sin(x @ self.kernel) - 0.5))
        self.optimizer.apply_gradients([(tape.gradient(loss, self.kernel), self.kernel)])
        return loss

def batch(number, worker):
    return np.random.default_rng([number, worker]).normal(size=[4, 3])

with ad.scope():
    model = Model()
steps = [ad.function(train, batch="per_worker") for train in (model.train, lambda x: model.train(x))]
folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints")
checkpoint = ad.checkpoint(folder, kernel=model.kernel, **{v.name: v for v in model.optimizer.variables})
done = checkpoint.restore() or 0
note(f"from{done}")
for number in range(done, 10):
    if number == 7 and me == 1 and not has_note("died"):
        note("died")
        os.kill(os.getpid(), signal.SIGKILL)
    steps[number % 2](batch(number, me))  # two steps that train one variable have one outer step
    if number == 5:
        checkpoint.save(step=6)
    if number in (2, 8):
        keep_between = model.kernel.numpy()
ad.end_local_steps()

alone = [Model(), Model()]
shared, velocity = alone[0].kernel.numpy(), 0.0
for number in range(10):
    for worker, one in enumerate(alone):
        one.train(tf.constant(batch(number, worker)))
    if (number + 1) % 4 == 0 or number == 9:
        before = shared
        change = np.mean([one.kernel.numpy() for one in alone], 0) - shared
        velocity = 0.9 * velocity + change
        shared = shared + 0.7 * (change + 0.9 * velocity)
        for one in alone:
            one.kernel.assign(shared)
keep(kernel=model.kernel.numpy(), expected=shared, between=keep_between, before=before)
"""


def test_a_run_that_resumes_between_outer_steps_equals_workers_that_train_one_after_the_other(tmp_path: Path) -> None:
    with Training(tmp_path, SCRIPT, SPEC) as run:
        assert run.wait(180) == 0, run.stderr
        run.assert_gone()
        assert run.has_note("from6") and run.has_note("died")
        first, second = run.kept(0), run.kept(1)
        for kept in (first, second):
            np.testing.assert_allclose(kept["kernel"], kept["expected"], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(kept["between"], kept["before"], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(first["kernel"], second["kernel"])
