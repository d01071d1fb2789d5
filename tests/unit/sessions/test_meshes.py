"""A session whose variables are divided over a mesh of one worker's devices, against a session of one device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.strategies import Mesh

v1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=(5, 6))
SIZES, DOWN = {"data": 2, "model": 2}, {"down": ("model",)}


def hidden_loss() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    draws = np.random.default_rng(1)
    up, down = (v1.get_variable(n, initializer=0.4 * draws.normal(size=s)) for n, s in (("up", (6, 8)), ("down", 8)))
    x = v1.placeholder(tf.float64, [None, 6], "x")
    return tf.reduce_mean(tf.square(tf.linalg.matvec(tf.tanh(x @ up), down) - 1.0)), up, down


def accumulated() -> tf.Tensor:
    """Adds gradients up, and applies them every second run, in a branch; only its result is fetched."""
    loss, *variables = hidden_loss()
    names = ("up_total", "down_total")
    totals = [v1.get_variable(n, initializer=np.zeros(v.shape)) for n, v in zip(names, variables, strict=True)]
    count = v1.get_variable("count", initializer=0, trainable=False)
    added = [total.assign_add(of) for total, of in zip(totals, tf.gradients(loss, variables), strict=True)]

    def apply() -> tf.Tensor:
        applied = [v.assign_sub(0.1 * total) for v, total in zip(variables, totals, strict=True)]
        with tf.control_dependencies(applied):
            emptied = [total.assign(tf.zeros_like(total)) for total in totals]
        with tf.control_dependencies(emptied):
            return tf.constant(1)

    with tf.control_dependencies(added):
        counted = count.assign_add(1)
    return tf.cond(tf.equal(counted % 2, 0), apply, lambda: tf.constant(0))


def written_twice() -> tf.Tensor:
    """A branch, and a loop after it, both write the divided variables."""
    loss, *variables = hidden_loss()
    gradients = tf.gradients(loss, variables)

    def apply() -> tf.Tensor:
        with tf.control_dependencies([v.assign(0.9 * v - of) for v, of in zip(variables, gradients, strict=True)]):
            return tf.constant(1)

    def shrink(turn: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([v.assign(tf.sin(v)) for v in variables]):
            return turn + 1

    with tf.control_dependencies([loss]):
        applied = tf.cond(loss > -1.0, apply, lambda: tf.constant(0))
    with tf.control_dependencies([applied]):
        return tf.while_loop(lambda turn: turn < 3, shrink, (tf.identity(applied),))


def by(optimizer: Callable[[], v1.train.Optimizer]) -> Callable[[], tf.Operation]:
    return lambda: optimizer().minimize(hidden_loss()[0])


def trained(build: Callable[[], tf.Tensor], session_of: Callable[[], v1.Session]) -> dict[str, np.ndarray]:
    train = build()
    session = session_of()
    session.run(v1.global_variables_initializer())
    for rows in (X, X[:3], X[:1]):
        session.run(train, {"x:0": rows})
    variables = v1.global_variables()
    return dict(zip([one.name for one in variables], session.run(variables), strict=True))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (accumulated, {"layouts": {"up": (None, "model"), **DOWN}}),
        (written_twice, {"layouts": {"up": (None, "model"), **DOWN}}),
        (by(lambda: v1.train.AdamOptimizer(0.01)), {"layouts": DOWN, "slots": {"up": "data"}}),
        (by(lambda: v1.train.MomentumOptimizer(0.1, 0.9)), {"layouts": {"up": (None, None), **DOWN}}),
    ],
    ids=["in a branch", "in a branch and a loop", "slots", "whole"],
)
def test_a_graph_trains_as_on_one_device(build: Callable[[], tf.Tensor], options: dict) -> None:
    with tf.Graph().as_default():
        expected = trained(build, v1.Session)
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3]}], "batch": "global"}
    ad = AutoDist(resource_spec=ResourceSpec.from_dict(spec), strategy=Mesh(mesh=SIZES, **options))
    with tf.Graph().as_default(), ad.scope():
        found = trained(build, ad.create_distributed_session)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
