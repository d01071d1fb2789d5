"""The network model sends the same messages as rewritten graphs."""

from __future__ import annotations

import math
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.names import node_of
from autodist.placement.group import Group
from autodist.proto import strategy_pb2
from autodist.synchronizers import Subgroups
from tests.unit.kernels.in_one_process import capture, plan, rewritten

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "scripts"))

from bench.network import Vector, by_link, messages

TEAMS = {"all": [], "4": [0, 0, 1, 1], "7": [0, 0, 0, 1, 1, 2, 2]}
ELEMENTS, STEP = 608, 8
"""Elements of float64: a multiple of the alignment of pieces."""


@pytest.fixture(scope="module")
def captured():
    weight = tf.Variable(np.ones(ELEMENTS), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return capture(step, np.ones((4, ELEMENTS)))


@pytest.mark.parametrize("whole", [64, 1 << 20])
@pytest.mark.parametrize("name", TEAMS)
def test_each_link_carries_what_the_model_says(name, whole, captured, monkeypatch):
    kernels = "autodist.kernels.communicate"
    monkeypatch.setattr(f"{kernels}.communicator.DIRECT_BYTES", whole)
    monkeypatch.setattr(f"{kernels}.reduce_by_shuffle.find_fused_buckets", lambda item, buckets, *rest: ([], buckets))
    numbers = TEAMS[name]
    workers = len(numbers) or 5
    strategy = plan(captured.step, workers)
    strategy.graph_config.subgroups[:] = numbers
    if numbers:
        strategy.nodes[0].all_reduce.spec = strategy_pb2.AllReduce.HIERARCHICAL
    vector = Vector(ELEMENTS, 8, STEP, whole)
    group = Group.of_workers(range(workers))
    told = messages(vector, group, Subgroups.of(numbers, group))
    assert by_link(told) == by_link(_sent(rewritten(captured, strategy)))


def _sent(items):
    """Returns the messages between workers for the weight's gradient, whose bucket is the largest."""
    sent: dict[str, list[tuple[tuple[int, int], int]]] = {}
    for step in items:
        nodes = {node.name: node for node in step.graph_def.node}
        for put in (node for node in nodes.values() if node.op == "QueueEnqueueV2"):
            queue = nodes[node_of(put.input[0])]
            key, _, source, to = queue.attr["shared_name"].s.decode().rsplit("/", 3)
            ((shape,), (kind,)) = queue.attr["shapes"].list.shape, queue.attr["component_types"].list.type
            size = math.prod(d.size for d in shape.dim) * tf.as_dtype(kind).size
            sent.setdefault(key, []).append(((int(source), int(to)), size))
    return max(sent.values(), key=lambda one: sum(size for _, size in one))
