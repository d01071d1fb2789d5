"""A script that only evaluates runs on all workers; extra calls of the chief alone block no worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

SCRIPT = """
import keras
keras.utils.set_random_seed(3)
keras.config.set_floatx("float64")
X = np.random.default_rng(1).normal(size=(15, 4))
ad._run.coordination.are_workers_distinguished = False  # a script of a user's has not asked yet

with ad.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

found = {"predicted": model.predict(X, batch_size=4, verbose=0)}
assert model.predict_function._is_shared
if ad.is_chief:
    found["alone"] = model.predict(X, batch_size=4, verbose=0)
    assert not model.predict_function._is_shared
found["evaluated"] = model.evaluate(X, X[:, :1], batch_size=4, verbose=0)
assert model.test_function._is_shared
keep(**found)
if me == 1:
    assert not (model.predict(X, verbose=0) is None or model.predict_function._is_shared)
"""


def test_a_script_that_only_evaluates_runs_on_all_workers(tmp_path: Path) -> None:
    with Training(tmp_path / "run", SCRIPT, TWO) as run:
        assert run.wait(120) == 0, run.stderr
        chief, other = run.kept(0), run.kept(1)
    np.testing.assert_array_equal(chief["predicted"], other["predicted"])
    np.testing.assert_array_equal(chief["evaluated"], other["evaluated"])
    np.testing.assert_allclose(chief["predicted"], chief["alone"], rtol=1e-13)
    assert chief["predicted"].shape == (15, 1)
