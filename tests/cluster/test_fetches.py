"""Fetches of two workers' sessions besides training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

START = 60.0

NORM = """
v1 = tf.compat.v1
v1.disable_v2_behavior()
with tf.Graph().as_default(), ad.scope():
    x = v1.placeholder(tf.float64, [None, 3])
    ones = np.ones(x.shape[1].value)
    kernels = [v1.get_variable(name, initializer=ones, use_resource=True) for name in ("one", "other")]
    loss = tf.reduce_mean(tf.reduce_sum(x * kernels[0] * kernels[1], 1))
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    gradients = optimizer.compute_gradients(loss)
    norm = tf.linalg.global_norm([gradient for gradient, _ in gradients])
    train = optimizer.apply_gradients(gradients)
    with ad.create_distributed_session() as session:
        session.run(v1.global_variables_initializer())
        for number in range(4):
            asked = [train, norm] if number % 2 or (number == 2 and ad.is_chief) else [train]
            print(number, session.run(asked, {x: np.ones([2, 3])})[1:])
"""


def test_who_fetches_it_alone_is_reported_and_the_run_ends(tmp_path: Path) -> None:
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    spec = {"nodes": nodes, "strategy": {"builder": "PSLoadBalancing"}}
    with Training(tmp_path, NORM, spec) as run:
        assert run.wait(START) == 1
        run.assert_gone()
    assert "1 [np.float64(2.2" in run.stdout
    assert "2 [" not in run.stdout.replace("[localhost:1] ", "")
    assert "FetchedElsewhereError: global_norm/global_norm:0 is fetched together with a training step" in run.stderr
    assert "Fetch it on every worker, not only under" in run.stderr


ALIKE = """
v1 = tf.compat.v1
v1.disable_v2_behavior()
x0, w0 = np.random.default_rng(1).normal(size=[7, 3]), np.linspace(0.5, 1.5, 3)
with tf.Graph().as_default(), ad.scope():
    x = v1.placeholder(tf.float64, [None, 3])
    weight = v1.get_variable("weight", initializer=w0, use_resource=True)
    rows = tf.linalg.matvec(x, weight)
    loss = tf.reduce_mean(tf.square(rows - 1.0))
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    gradients = optimizer.compute_gradients(loss)
    (clipped,), norm = tf.clip_by_global_norm([gradients[0][0]], 0.5)
    train = optimizer.apply_gradients([(clipped, weight)])
    with ad.create_distributed_session() as session:
        session.run(v1.global_variables_initializer())
        mine = x0[ad.worker_index :: ad.num_workers]
        alike = session.run([train, norm, loss, gradients[0][0], rows], {x: mine})[1:]
        session.run([train] if me else [train, norm, loss][::2], {x: mine})
        keep(norm=alike[0], loss=alike[1], gradient=alike[2], rows=alike[3], weight=session.run(weight))
"""


@pytest.mark.parametrize("builder", ["AllReduce", "PS"])
def test_what_all_fetch_is_of_the_whole_batch_and_what_one_fetches_alone_is_named(tmp_path: Path, builder: str) -> None:
    """Under PS the chief owns all variables, so that it can fetch the norm alone, and the other worker cannot."""
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    with Training(tmp_path, ALIKE, {"nodes": nodes, "strategy": {"builder": builder}}) as run:
        assert run.wait(START) == 0, run.stderr
        found = [run.kept(0), run.kept(1)]
    x, weight = np.random.default_rng(1).normal(size=[7, 3]), np.linspace(0.5, 1.5, 3)
    errors = x @ weight - 1.0
    gradient = 2 * x.T @ errors / 7
    for worker, kept in enumerate(found):
        np.testing.assert_allclose(kept["loss"], np.mean(errors**2), rtol=1e-12)
        np.testing.assert_allclose(kept["gradient"], gradient, rtol=1e-12)
        np.testing.assert_allclose(kept["norm"], np.linalg.norm(gradient), rtol=1e-12)
        np.testing.assert_allclose(kept["rows"], errors[worker::2] + 1.0, rtol=1e-12)
    assert run.stderr.count("is computed from this worker's own examples") == 1
