"""The kernels Prune and Place."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context
from autodist.kernels.finish.place_on_devices import PlaceOnDevices
from autodist.kernels.finish.prune import Prune
from autodist.proto import strategy_pb2
from tests.unit.graph.graph_text import assert_text, from_text
from tests.unit.graph.replicated import replicated

GRAPH = "a = Placeholder()\nb = Neg(a)\nc = Neg(a)\nv = VarHandleOp()"
V = Variable("v", "v", (), tf.float32, trainable=True)


def context(*devices, worker=0):
    replicas = [strategy_pb2.Replica(worker=w, device=d) for w, d in devices]
    return Context(strategy_pb2.Strategy(graph_config=strategy_pb2.GraphConfig(replicas=replicas)), worker)


ONE = context((0, "cpu:0"))


def test_what_is_needed_stays():
    step = CapturedStep(from_text(GRAPH), variables=(V,), outputs=("b:0",), targets=("c",))
    assert_text(Prune().apply(step, ONE).graph_def, GRAPH)


def test_what_nothing_needs_goes_and_inputs_and_handles_stay():
    step = CapturedStep(from_text(GRAPH), variables=(V,), inputs={"a:0": 0})
    assert_text(Prune().apply(step, ONE).graph_def, "a = Placeholder()\nv = VarHandleOp()")


def test_a_variable_that_is_gone_already_does_no_harm():
    step = CapturedStep(from_text("a = Placeholder()"), variables=(V,), outputs=("a:0",))
    assert_text(Prune().apply(step, ONE).graph_def, "a = Placeholder()")


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
    graph_def = from_text(GRAPH)
    graph_def.node[1].attr["_class"].list.s[:] = [b"loc:@v"]
    found = PlaceOnDevices().apply(CapturedStep(graph_def), ONE).graph_def
    assert "_class" not in found.node[1].attr and "_class" in graph_def.node[1].attr
