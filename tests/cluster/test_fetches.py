"""What a session fetches beside training of what other workers own."""

from __future__ import annotations

from pathlib import Path

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


def test_who_fetches_it_alone_is_told_and_the_run_ends(tmp_path: Path) -> None:
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    spec = {"nodes": nodes, "strategy": {"builder": "PSLoadBalancing"}}
    with Training(tmp_path, NORM, spec) as run:
        assert run.wait(START) == 1
        run.assert_gone()
    assert "1 [np.float64(2.2" in run.stdout
    assert "2 [" not in run.stdout.replace("[localhost:1] ", "")
    assert "FetchedElsewhereError: global_norm/global_norm:0 is fetched together with a training step" in run.stderr
    assert "Fetch it on every worker alike" in run.stderr
