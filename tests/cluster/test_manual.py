"""A manual region on two workers: its collectives train as one device does."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist
from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

CLUSTER = {
    "nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}],
    "strategy": {
        "builder": "Mesh",
        "mesh": {"model": 2},
        "variables": {"up": {"sharding": [None, "model"]}, "down": {"sharding": ["model"]}},
    },
}


def trained(ad, function) -> dict[str, np.ndarray]:
    """Trains two matrices, whose products a region adds, and a table of experts that it exchanges."""
    draw = np.random.default_rng(0)
    up, down = tf.Variable(draw.normal(size=(4, 6)), name="up"), tf.Variable(draw.normal(size=(6, 4)), name="down")
    experts = tf.Variable(draw.normal(size=(2, 4, 4)), name="experts")

    def body(x, up, down, experts):
        h = ad.all_reduce(tf.nn.tanh(x @ up) @ down, "model")
        sent = ad.all_to_all(tf.reshape(experts, [2, 2, 2, 4]), "model", split_axis=1, concat_axis=0)
        table = ad.all_gather(tf.nn.tanh(sent), "model", 1)
        return tf.einsum("nd,ghkd->n", h, table)

    layouts = [(), (None, "model"), ("model",), ("model",)]
    region = ad.manual(body, inputs=layouts, outputs=[()], axes=["model"])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(region(x, up, down, experts)))
        for variable, gradient in zip([up, down, experts], tape.gradient(loss, [up, down, experts]), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    step = function(step)
    losses = [float(step(draw.normal(size=(rows, 4)))) for rows in (5, 3, 4)]
    return {"losses": np.asarray(losses), "up": up.numpy(), "down": down.numpy(), "experts": experts.numpy()}


class OneDevice:
    """The calls of an AutoDist outside of its steps."""

    all_reduce, all_gather, all_to_all, manual = (
        getattr(AutoDist, name) for name in ("all_reduce", "all_gather", "all_to_all", "manual")
    )


def test_a_manual_region_trains_as_one_device(tmp_path: Path) -> None:
    script = inspect.getsource(trained) + '\nwith ad.scope():\n    keep(**trained(ad, ad.function(batch="global")))\n'
    expected = trained(OneDevice(), lambda step: step)
    with Training(tmp_path, script, CLUSTER) as run:
        assert run.wait(90) == 0, run.stderr
        run.assert_gone()
        for worker in range(2):
            kept = run.kept(worker)
            for key, value in expected.items():
                np.testing.assert_allclose(kept[key], value, rtol=1e-9, atol=1e-12, err_msg=key)
    assert "all_to_all" in run.stderr
