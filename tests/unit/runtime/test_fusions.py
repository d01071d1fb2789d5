"""Convolutions that TensorFlow fuses to ops that its server does not accept."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist.runtime.fusions import keep_apart
from tests.equivalence.harness import ROOT, run_to_its_end

v1 = tf.compat.v1


def graph_of(dtype: tf.DType, in_function: bool) -> v1.GraphDef:
    """A convolution with its bias, or one in a branch of a condition."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(dtype, [None, 4, 4, 1], "x")
        kernel, bias = tf.ones([3, 3, 1, 2], dtype), tf.constant([1, 2], dtype)
        flag = v1.placeholder(tf.bool, [], "flag")
        convolved = lambda: tf.nn.conv2d(x, kernel, 1, "SAME")  # noqa: E731
        biased = lambda: tf.nn.relu(tf.nn.bias_add(convolved(), bias))  # noqa: E731
        found = tf.cond(flag, lambda: [convolved(), biased()], lambda: [tf.concat([x, x], 3)] * 2)
        tf.identity_n(found if in_function else [convolved(), biased()], "y")
    return graph.as_graph_def()


def run(definition: v1.GraphDef, target: str = "") -> list[np.ndarray]:
    with tf.Graph().as_default(), v1.Session(target) as session:
        tf.import_graph_def(definition, name="")
        return session.run(["y:0", "y:1"], {"x:0": np.arange(32).reshape(2, 4, 4, 1), "flag:0": True})


@pytest.mark.parametrize("in_function", [False, True])
def test_a_graph_without_any_of_bfloat16_stays_as_it_is(in_function: bool) -> None:
    definition = graph_of(tf.float32, in_function)
    assert keep_apart(definition) is definition


@pytest.mark.parametrize("in_function", [False, True])
def test_those_of_bfloat16_have_a_copy_between_them_and_all_that_read_them(in_function: bool) -> None:
    definition = graph_of(tf.bfloat16, in_function)
    before = definition.SerializeToString(deterministic=True)
    apart = keep_apart(definition)
    assert definition.SerializeToString(deterministic=True) == before
    nodes = [*apart.node, *(node for function in apart.library.function for node in function.node_def)]
    names = [node.name for node in nodes if node.op == "Conv2D"]
    readers = [node.op for node in nodes for i in node.input if i.partition(":")[0] in names]
    assert len(names) >= 2 and readers == ["PlaceholderWithDefault"] * len(names)
    for one, other in zip(run(definition), run(apart), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.processes
def test_a_server_runs_them(tmp_path: Path) -> None:
    """A server stands as long as its process."""
    (tmp_path / "script.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import tensorflow as tf; from autodist.runtime.fusions import keep_apart\n"
        "from tests.unit.runtime.test_fusions import graph_of, run\n"
        "target = tf.distribute.Server.create_local_server().target\n"
        "for in_function in (False, True):\n"
        "    run(keep_apart(graph_of(tf.bfloat16, in_function)), target)\n"
    )
    ended = run_to_its_end([sys.executable, str(tmp_path / "script.py")], tmp_path, 120, is_forked=True)
    assert ended.problem is None, f"{ended.problem}\n{ended.output}"
