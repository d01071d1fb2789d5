"""Steps of one run may have variables and tensors of equal names and other shapes, as `tf.Variable` names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.step import Step
from tests.unit.kernels.in_one_process import capture, plan, rewritten

MODES: dict[str, dict[str, Any]] = {
    "all-reduce": {"owners": {}},
    "servers": {},
    "cached copies": {"local_proxy": True},
    "layers": {"layer": 1},
    "stale": {"staleness": 2, "local_proxy": True},
    "asynchronous": {"asynchronous": True, "local_proxy": True},
}


@pytest.mark.parametrize("owners", [(0, 1), (1, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_a_queue_that_steps_share_has_the_same_shapes_in_each(mode: str, owners: tuple[int, int]) -> None:
    def steps(width: int) -> list[Step]:
        weights, others = tf.Variable(tf.ones([4, width])), tf.Variable(tf.ones([4, width]))

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weights + x @ others) ** 2)
            gradient, _ = tape.gradient(loss, (weights, others))
            for variable in (weights, others):
                variable.assign_sub(0.1 * gradient)
            return loss

        captured = capture(step, np.ones((2, 4), np.float32))
        names = [variable.name for variable in captured.step.variables]
        options = {"owners": dict(zip(names, owners, strict=True))} | MODES[mode]
        return rewritten(captured, plan(captured.step, 2, 1, **options))

    for first, second in zip(steps(2), steps(3), strict=True):
        queues, others = _queues(first), _queues(second)
        assert queues
        for name in queues.keys() & others.keys():
            assert queues[name] == others[name], name


def _queues(step: Step) -> dict[str, tuple[str, ...]]:
    """The attributes that TensorFlow compares, by the name of each queue in the session."""
    queues = [node for node in step.graph_def.node if node.op == "FIFOQueueV2"]
    return {
        node.attr["shared_name"].s.decode(): tuple(str(node.attr[key]) for key in ("component_types", "shapes"))
        for node in queues
    }
