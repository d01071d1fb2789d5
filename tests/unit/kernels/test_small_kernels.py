"""The kernels Prune and Place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensorflow as tf

from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep
from autodist.kernels.context import Context
from autodist.kernels.finish.place_on_devices import PlaceOnDevices
from autodist.kernels.finish.prune import Prune
from autodist.proto import strategy_pb2
from tests.unit.graph.graph_text import from_text
from tests.unit.graph.replicated import replicated
from tests.unit.kernels.rewrites import assert_rewrites, cases

V = Variable("v", "v", (), tf.float32, trainable=True)


def context(*devices, worker=0):
    replicas = [strategy_pb2.Replica(worker=w, device=d) for w, d in devices]
    return Context(strategy_pb2.Strategy(graph_config=strategy_pb2.GraphConfig(replicas=replicas)), worker)


ONE = context((0, "cpu:0"))


@cases(
    {
        "nodes that an output or a target needs stay": """
            a = Placeholder()
            b = Neg(a)
            c = Neg(a)
            return b:0
            run c
        """,
        "nodes that nothing needs go": """
            a = Placeholder()
          - b = Neg(a)
            c = Neg(a)
          - v = VarHandleOp()
            run c
        """,
    }
)
def test_prune(text):
    assert_rewrites(Prune(), text)


def test_inputs_and_handles_of_variables_stay():
    fields = {"variables": (V, replace(V, handle="gone")), "inputs": {"a:0": 0}}
    assert_rewrites(Prune(), "  a = Placeholder()\n- b = Neg(a)\n  v = VarHandleOp()", **fields)


def placed(names_and_devices, where):
    graph_def = tf.compat.v1.GraphDef()
    for name, device in names_and_devices.items():
        graph_def.node.add(name=name, op="NoOp", device=device)
    step = replicated(graph_def, copies={"copy": (1, "a"), "another": (7, "a")})
    found = PlaceOnDevices().apply(step, where).graph_def
    return {n.name: n.device for n in found.node}


GPUS = context((0, "gpu:0"), (0, "gpu:1"), (1, "gpu:0"), (1, "gpu:1"), worker=1)


@pytest.mark.parametrize(
    "name, asked, where, expected",
    [
        ("a", "", ONE, "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("a", "/device:GPU:0", ONE, "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("copy", "", context((0, "cpu:0"), (0, "cpu:1")), "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("a", "", GPUS, "/job:worker/replica:0/task:1/device:GPU:0"),
        ("copy", "", GPUS, "/job:worker/replica:0/task:1/device:GPU:1"),
        ("another", "", GPUS, "/job:worker/replica:0/task:1/device:GPU:0"),
        ("autodist/replica_1/a", "", GPUS, "/job:worker/replica:0/task:1/device:GPU:0"),  # a script's own name
        ("a", "/device:CPU:0", GPUS, "/job:worker/replica:0/task:1/device:CPU:0"),
        ("a", "/job:worker/replica:0/task:0/device:CPU:0", GPUS, "/job:worker/replica:0/task:0/device:CPU:0"),
    ],
)
def test_every_node_gets_a_device_of_a_worker(name, asked, where, expected):
    assert placed({name: asked}, where) == {name: expected}


def test_a_node_stands_where_its_device_says_and_not_beside_another():
    graph_def = from_text("a = Placeholder()\nb = Neg(a)\nv = VarHandleOp()")
    graph_def.node[1].attr["_class"].list.s[:] = [b"loc:@v"]
    found = PlaceOnDevices().apply(CapturedStep(graph_def), ONE).graph_def
    assert "_class" not in found.node[1].attr and "_class" in graph_def.node[1].attr
