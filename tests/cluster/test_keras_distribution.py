"""`keras.distribution` on two workers: `DataParallel` trains as one device, and `ModelParallel` ends both alike."""

from __future__ import annotations

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 2}]}
START = 60.0


def fit() -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.default_rng(1).normal(size=(13, 4))
    model.fit(x, x @ np.ones((4, 1)), batch_size=5, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


MODEL = "import keras\nfrom keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel\n"
MODEL += inspect.getsource(fit)


def test_data_parallel_trains_as_one_device_on_the_places_of_the_run(tmp_path: Path) -> None:
    script = (
        MODEL
        + """
with ad.scope():
    keras.distribution.set_distribution(DataParallel(DeviceMesh((4,), ["batch"])))
    keep(**{f"w{k}": value for k, value in enumerate(fit())}, devices=keras.distribution.list_devices())
"""
    )
    floatx = keras.config.floatx()
    expected = fit()
    keras.config.set_floatx(floatx)
    with Training(tmp_path, script, TWO) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        for worker in range(2):
            kept = run.kept(worker)
            assert kept.pop("devices").tolist() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
            for k, value in enumerate(expected):
                np.testing.assert_allclose(kept[f"w{k}"], value, rtol=1e-9)


@pytest.mark.parametrize("shape, cause", [((1, 4), "ModelParallel is set"), ((2, 4), "has 8 places, and the run has")])
def test_model_parallel_ends_both_workers_before_any_training_with_one_cause(
    tmp_path: Path, shape: tuple[int, int], cause: str
) -> None:
    script = (
        MODEL
        + f"""
layouts = LayoutMap(DeviceMesh({shape}, ["batch", "model"]))
layouts[".*kernel"] = (None, "model")
with ad.scope():
    note(f"scope{{me}}")
    wait_for(f"scope{{1 - me}}")
    keras.distribution.set_distribution(ModelParallel(layout_map=layouts))
    fit()
    note("trained")
"""
    )
    with Training(tmp_path, script, TWO) as run:
        assert run.wait(START) == 1, run.stderr
        run.assert_gone()
    assert not (tmp_path / "notes" / "trained").exists()
    assert "StrategyError: " in run.stderr and cause in run.stderr, run.stderr
    causes = {line.partition("StrategyError: ")[2] for line in run.stderr.splitlines() if "StrategyError: " in line}
    assert len(causes) == 1, run.stderr
