"""Origins: errors name the line of the script that created a node."""

from __future__ import annotations

import inspect
import runpy

import keras
import pytest
import tensorflow as tf

from autodist.capture.function import capture_function
from autodist.errors import CaptureError, RewriteError
from autodist.graph.names import node_of
from autodist.graph.origins import note_origins, origins_in
from autodist.graph.step import Step
from autodist.kernels.base import Context, Kernel, run_pipeline
from autodist.proto import strategy_pb2

WEIGHT = tf.Variable([[1.0], [2.0]], name="weight")


def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ WEIGHT))
        if loss > 1:
            loss = loss + 1.0
    WEIGHT.assign_sub(tape.gradient(loss, WEIGHT))  # here
    return loss


def here(function, mark):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(k for k, line in enumerate(lines) if mark in line)}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Changes the working directory; file names in errors are relative to it."""
    monkeypatch.chdir(tmp_path)


def captured(function) -> Step:
    return capture_function(function, (tf.TensorSpec([None, 2], tf.float32),), [0]).step


def test_a_node_is_made_in_a_line_of_the_script():
    item = captured(step)
    (written,) = (node.name for node in item.graph_def.node if node.op == "AssignSubVariableOp")
    assert item.origin_of(written) == here(step, "# here")
    assert item.origin_of(node_of(item.outputs[0])) is not None
    assert item.origin_of("none/of/these") is None


def test_what_a_library_makes_is_made_where_the_script_calls_it():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def with_model(x):
        with tf.GradientTape() as tape:
            loss = model(x)  # here
        model.weights[0].value.assign_sub(tape.gradient(loss, model.weights[0].value))
        return loss

    step = captured(with_model)
    assert step.origin_of(node_of(step.outputs[0])) == here(with_model, "# here")


def test_files_in_the_working_directory_are_told_by_their_names(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import tensorflow as tf\n\nmade = tf.constant(1, name='one')\n", encoding="utf-8")
    with tf.Graph().as_default() as graph:
        runpy.run_path(str(script))
    assert note_origins(graph, ["one"])("one") == "train.py:3"


def test_a_text_is_told_of_the_nodes_that_it_names():
    lines = {"a/b": "train.py:1", "c": "train.py:2", "d": "train.py:2"}
    text = "a/b:0, which is not known; see c and d (c:1) before e."
    assert list(origins_in(text, lines.get)) == ["a/b is created in train.py:1", "c is created in train.py:2"]
    assert list(origins_in("it ends with a/b.", lines.get)) == ["a/b is created in train.py:1"]


def test_an_error_of_a_kernel_tells_of_the_lines_of_what_it_names():
    item = captured(step)

    class Refusing(Kernel):
        name = "refusing"

        def apply(self, item, context):
            raise RewriteError(f"{item.outputs[0]} cannot be rewritten")

    with pytest.raises(RewriteError) as raised:
        run_pipeline([Refusing()], item, Context(strategy_pb2.Strategy(), 0))
    name = node_of(item.outputs[0])
    assert raised.value.__notes__ == [
        f"{name} is created in {item.origin_of(name)}",
        "in the kernel refusing, for worker 0",
    ]


def test_a_resource_that_is_refused_is_told_with_its_line():
    queue = tf.queue.FIFOQueue(1, tf.float32, [[3, 2]])

    def from_queue(x):
        return step(queue.dequeue() + x)  # here

    with pytest.raises(CaptureError) as raised:
        captured(from_queue)
    assert f"in {here(from_queue, '# here')}" in str(raised.value)
