"""AddDataFlowEdges: tensors that are sharded alike since control flow or a variable passes a value on."""

from __future__ import annotations

import re
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.step import CapturedStep
from autodist.kernels import Context
from autodist.kernels.shard.add_data_flow_edges import AddDataFlowEdges
from tests.unit.kernels.annotation_text import annotations_from, text_of_annotations
from tests.unit.kernels.in_one_process import capture, plan
from tests.unit.kernels.rewrites import cases
from tests.unit.kernels.shard.imports import assert_imports

MESH = "mesh mesh = {a: 2, b: 2}"


@cases(
    {
        "a variable: the values written, and its reads": """
              w = VarHandleOp(shape=[4, 6])
              r = ReadVariableOp(w)
              h = Identity(w)
              s = ReadVariableOp(h)
              n = Neg(r)
              u = AssignVariableOp(w, n)
              d = AssignSubVariableOp(w, s, ^u)
              mesh mesh = {a: 2, b: 2}
              variable w: [–, b] (cluster.yml:5)
            + edge w: n:0, s:0 → r:0, s:0 [–, b] (cluster.yml:5)
        """,
        "all operands of a fused update that have the shape of the variable": """
              w = VarHandleOp(shape=[4, 6])
              m = VarHandleOp(shape=[4, 6])
              g = Placeholder(shape=[4, 6])
              l = 0.5
              o = 0.25
              u = ResourceApplyMomentum(w, m, l, g, o)
              mesh mesh = {a: 2, b: 2}
              variable w: [–, b] (cluster.yml:5)
            + edge w: g:0 → [–, b] (cluster.yml:5)
            + edge m: g:0 →
        """,
        "scalars, and rows of a table, are on no edge": """
              t = VarHandleOp(shape=[4, 6])
              s = VarHandleOp(dtype=int64, shape=[])
              ids = Placeholder(dtype=int32, shape=[2])
              g = ResourceGather(t, ids)
              r = ReadVariableOp(s)
              q = ReadVariableOp(t)
              mesh mesh = {a: 2, b: 2}
              variable t: [b, –]
            + edge t: → q:0 [b, –]
        """,
        "a branch of TensorFlow 1": """
              x = Placeholder(shape=[8, 16])
              p = Placeholder(dtype=bool, shape=[1])
              axis = [0]
              q = Any(p, axis)
              s = Switch(x, q)
              a = Exp(s)
              b = Neg(s:1)
              m = Merge(a, b)
              y = Neg(m)
              mesh mesh = {a: 2, b: 2}
              tensor y:0: [–, b] (train.py:7)
            + edge s:0: x:0 → s:0, s:1
            + edge m:0: a:0, b:0 → m:0
        """,
        "inputs and outputs of a manual region, without its axes": """
              x = Placeholder(shape=[8, 16])
              i = Identity(x)
              n = Neg(i)
              o = Identity(n)
              mesh mesh = {a: 2, b: 2}
              region f over a (train.py:7)
              input i of f: [a, b] (train.py:7)
              output o of f: [–, b?] !a (train.py:7)
              body of f: n
            + edge i:0: x:0 → i:0 [–, b] (train.py:7)
            + edge o:0: n:0 → o:0 [–, b?] (train.py:7)
        """,
        "nothing is annotated": "w = VarHandleOp(shape=[4, 6])\nr = ReadVariableOp(w)\nmesh mesh = {a: 2, b: 2}",
    }
)
def test_edges_are_added(text):
    assert_imports(AddDataFlowEdges(), text)


def edges_of(step, *lines):
    """Returns the annotations that the pass adds; function names lose their numbers."""
    step = replace(step, annotations=annotations_from([MESH, *lines]))
    context = Context(plan(step, 1, 4), 0)
    made = AddDataFlowEdges().apply(step, context)
    assert AddDataFlowEdges().apply(made, context) is made
    found = [line for line in text_of_annotations(made.annotations) if line.startswith(("edge", "whole"))]
    return [re.sub(r"_\d+(?=@)", "", line) for line in found], made


def loop(x):
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.exp(h)), (0, x))[1]


def body_of(captured):
    return next(node.attr["body"].func.name for node in captured.step.graph_def.node if "body" in node.attr)


def test_a_loop_has_one_edge_for_each_tensor_that_is_no_scalar():
    captured = capture(loop, np.ones([8, 16]))
    edges, _ = edges_of(captured.step, "tensor x:0: [a, –] (train.py:7)")
    sources = "x:0, while_body@while/Identity_3:0"
    targets = "while:3, while_body@while_placeholder_1:0, while_cond@while_placeholder_1:0"
    assert edges == [f"edge while:3: {sources} → {targets} [a?, ?] (train.py:7)"]


def test_an_edge_is_open_and_a_closed_sharding_in_the_body_stays_there():
    captured = capture(loop, np.ones([8, 16]))
    result = f"{body_of(captured)}@while/Identity_3:0"
    edges, made = edges_of(captured.step, f"tensor {result}: [–, b] (train.py:7)")
    assert len(edges) == 1 and edges[0].endswith(" [?, b?] (train.py:7)")
    assert str(made.annotations.tensors[result].sharding) == "[–, b]"


def test_a_layout_reaches_the_reads_the_writes_and_the_slot_of_a_variable():
    weight, other = (tf.Variable(np.ones([4, 6]), name=name) for name in ("weight", "other"))
    momentum, mean = tf.Variable(np.zeros([4, 6]), name="momentum"), tf.Variable(np.zeros([6]), name="mean")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight) + tf.reduce_sum(other)
        gradient = tape.gradient(loss, weight)
        momentum.assign(0.9 * momentum + gradient)
        mean.assign(0.9 * mean + tf.reduce_mean(momentum, 0))
        weight.assign_sub(0.1 * momentum)
        return loss

    _, made = edges_of(capture(step, np.ones([2, 4])).step, "variable weight: [–, b] (cluster.yml:5)")
    by_owner = {edge.owner: edge for edge in made.annotations.edges}
    assert {owner: edge.constraint and str(edge.sharding) for owner, edge in by_owner.items()} == {
        "weight": "[–, b]", "momentum": "[–, b]", "other": None, "mean": None,
    }  # fmt: skip
    assert all(len(by_owner[name].sources) == 1 for name in ("weight", "momentum", "mean"))
    assert len(by_owner["momentum"].targets) >= 2
    (reached,) = made.annotations.reached().values()
    assert {"weight", "momentum", *by_owner["weight"].targets, *by_owner["momentum"].sources} <= set(reached)


def test_the_arguments_and_results_of_branches():
    def step(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.exp(x), lambda: tf.sin(x))

    edges, _ = edges_of(capture(step, np.ones([8, 16])).step, "tensor x:0: [a, –]")
    assert edges == [
        "edge cond_true@cond_exp_x:0: x:0 → cond_true@cond_exp_x:0, cond_false@cond_sin_x:0 [a?, ?]",
        "edge cond:0: cond_true@cond/Identity:0, cond_false@cond/Identity:0 → cond:0",
    ]


def step_in(graph):
    """Returns the step of a graph, with the shapes that TensorFlow knows."""

    def spec_of(name):
        found = graph.get_tensor_by_name(name)
        return tf.TensorSpec(found.shape, found.dtype)

    return CapturedStep(graph.as_graph_def(), noted=spec_of)


def test_a_loop_of_tensorflow_1_has_one_edge_for_each_tensor():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.disable_control_flow_v2()
        try:
            x = tf.compat.v1.placeholder(tf.float64, [8, 16], "x")
            tf.compat.v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.exp(h, name="h")), (0, x))
        finally:
            tf.compat.v1.enable_control_flow_v2()
    edges, _ = edges_of(step_in(graph), "tensor while/h:0: [–, b] (train.py:7)")
    nodes = ("Enter_1", "Merge_1", "Switch_1", "Switch_1", "NextIteration_1", "Exit_1")
    (edge,) = edges
    owner, _, flow = edge.partition(": ")
    sources, _, targets = flow.removesuffix(" [?, b?] (train.py:7)").partition(" → ")
    assert sources == "x:0, while/h:0"
    assert sorted(targets.split(", ")) == sorted(f"while/{n}:{int(k == 3)}" for k, n in enumerate(nodes))
    assert owner == f"edge {targets.split(', ')[0]}"


@tf.function
def doubled(x):
    return tf.exp(x) + x


@pytest.mark.parametrize(
    "shardings, functions", [(("[a, –]", "[a, –]"), 1), (("[a, –]", None), 1), (("[a, –]", "[–, b]"), 2)]
)
def test_a_function_that_two_calls_want_sharded_differently_is_copied(shardings, functions):
    with tf.Graph().as_default() as graph:  # capture inlines calls
        x = tf.compat.v1.placeholder(tf.float64, [8, 16], "x")
        tf.add(doubled(tf.identity(x, name="c")), doubled(tf.identity(x, name="d")))
    step = step_in(graph)
    names = [f"constraint {name}: {text}" for name, text in zip("cd", shardings, strict=True) if text]
    _, made = edges_of(step, *names)
    called = [node.attr["f"].func.name for node in made.graph_def.node if "f" in node.attr]
    assert len(called) == 2 and len(set(called)) == functions
    arguments = [edge for edge in made.annotations.edges if edge.owner.endswith("@x:0")]
    assert [str(edge.sharding) for edge in arguments] == (["[a?, ?]"] if functions == 1 else ["[a?, ?]", "[?, b?]"])


def test_the_state_of_an_lstm_is_on_an_edge_and_the_list_of_its_outputs_stays_whole():
    keras.utils.set_random_seed(0)
    layer = keras.layers.LSTM(6, return_sequences=True, dtype="float64")
    layer.build((None, 5, 4))
    captured = capture(lambda x: tf.reduce_sum(layer(x)), np.ones([2, 5, 4]))
    _, made = edges_of(captured.step, "variable lstm/lstm_cell/kernel: [–, b]", "variable recurrent: [b]")
    assert made.annotations.whole and set(made.annotations.whole.values()) == {"a list of tensors"}
    loops = [edge for edge in made.annotations.edges if edge.owner.startswith("lstm")]
    assert len(loops) >= 2
