"""`fit` with arguments that differ by worker ends the run; evaluations that differ stay local to each worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPEC = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "strategy": {"builder": "PS"}}

SCRIPT = """
import keras
keras.config.set_floatx("float64")
X = np.random.default_rng(1).normal(size=(16, 4))
Y = X[:, :1]

with ad.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

options = {"batch_size": 4, "verbose": 0}
model.fit(X, Y, **options)
predicted = model.predict_on_batch(X)
errors = (predicted - Y) ** 2
found = {
    "steps": model.evaluate(X, Y, steps=2 + me, **options) - errors[: 8 + 4 * me].mean(),
    "rows": model.predict(X[: 8 + 4 * me], **options) - predicted[: 8 + 4 * me],
}
assert not (model.test_function.is_shared or model.predict_function.is_shared)
if ad.is_chief:
    found["chief"] = model.evaluate(X[:8], Y[:8], **options) - errors[:8].mean()
found["alike"] = model.evaluate(X, Y, **options) - errors.mean()
history = model.fit(X, Y, validation_data=(X, Y), validation_steps=1 + me, **options).history
keep(**found, validated=history["val_loss"] - np.mean((model.predict_on_batch(X[:4]) - Y[:4]) ** 2))
model.fit(X, Y, batch_size=4 + 4 * me, verbose=0)
"""


def test_fit_that_differs_is_refused_and_evaluations_that_differ_are_each_workers_own(tmp_path: Path) -> None:
    with Training(tmp_path, SCRIPT, SPEC) as run:
        assert run.wait(120) != 0, run.stderr
        run.assert_gone()
    for worker in (0, 1):
        kept = run.kept(worker)
        assert ("chief" in kept) is (worker == 0)
        for name, difference in kept.items():
            np.testing.assert_allclose(difference, 0, atol=1e-13, err_msg=f"{name} on worker {worker}")
    assert "fit is called with another value of batch_size here than on the chief" in run.stderr
    assert run.stderr.index("chief:  4") < run.stderr.index("here:   8")
