"""StepEditor: the outputs and targets of a step follow the edits of its graph."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.step import CapturedStep, Step
from autodist.graph.step_editor import StepEditor
from tests.unit.graph.graph_text import from_text


@pytest.fixture
def step() -> Step:
    """Returns a step: x → double → sum, double → log; a check that waits for `double`."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        double = tf.add(x, x, name="double")
        tf.reduce_sum(double, name="sum")
        tf.raw_ops.Log(x=double, name="log")
        with tf.control_dependencies([double]):
            tf.no_op(name="check")
    return CapturedStep(
        graph.as_graph_def(),
        inputs={"x:0": 0},
        outputs=("double:0", "sum:0"),
        targets=("double", "check"),
        background_nodes=("log",),
        standing_nodes=("check",),
    )


def test_what_all_read_the_step_returns(step: Step) -> None:
    editor = StepEditor(step)
    editor.rewire("double", "x")
    assert editor.to_step().outputs == ("x:0", "sum:0")


def test_what_some_read_the_step_does_not_return(step: Step) -> None:
    editor = StepEditor(step)
    editor.rewire("double:0", "x:0", ["sum"])
    made = editor.to_step()
    assert made.outputs == step.outputs
    assert made.graph_index.nodes["sum"].input[0] == "x"


def test_what_all_wait_for_the_step_runs(step: Step) -> None:
    editor = StepEditor(step)
    editor.replace_control("double", ["log", "x"])
    made = editor.to_step()
    assert made.targets == ("log", "x", "check")
    assert list(made.graph_index.nodes["check"].input) == ["^log", "^x"]


def test_what_some_wait_for_the_step_does_not_run(step: Step) -> None:
    editor = StepEditor(step)
    editor.replace_control("double", ["log"], ["check"])
    assert editor.to_step().targets == step.targets


def test_a_removed_node_runs_no_more(step: Step) -> None:
    editor = StepEditor(step)
    editor.remove(["check", "log"])
    made = editor.to_step()
    assert (made.targets, made.background_nodes, made.standing_nodes) == (("double",), (), ())


def test_another_node_runs_in_the_place_of_one_in_every_program(step: Step) -> None:
    editor = StepEditor(step)
    editor.replace_target("check", ["log"])
    editor.replace_target("log", ["sum", "double"])
    made = editor.to_step()
    assert (made.targets, made.background_nodes, made.standing_nodes) == (
        ("double", "sum"),
        ("sum", "double"),
        ("sum", "double"),
    )


def test_roots_are_added_each_once(step: Step) -> None:
    editor = StepEditor(step)
    editor.run(["sum", "check"])
    editor.serve(["log", "sum"])
    editor.stand(["sum"])
    editor.initialize({"log/0": "log"})
    made = editor.to_step()
    assert (made.targets, made.background_nodes, made.standing_nodes) == (
        ("double", "check", "sum"),
        ("log", "sum"),
        ("check", "sum"),
    )
    assert made.initializers == {"log/0": "log"}


def test_a_step_that_returns_what_was_removed_is_refused(step: Step) -> None:
    editor = StepEditor(step)
    editor.remove(["sum"])
    with pytest.raises(RewriteError, match="sum:0, an output of the step, is no longer in the graph"):
        editor.to_step()


def test_the_step_that_is_changed_stays_as_it_was(step: Step) -> None:
    before = step.graph_def.SerializeToString(deterministic=True)
    editor = StepEditor(step)
    editor.rewire("double:0", "x:0")
    editor.run(["sum"])
    assert editor.to_step().outputs != step.outputs
    assert step.graph_def.SerializeToString(deterministic=True) == before
    assert step.targets == ("double", "check")


def test_what_is_known_of_tensors_is_what_was_captured_and_what_was_noted():
    step = CapturedStep(from_text("a = Placeholder()\nb = Neg(a)"), noted={"a:0": tf.TensorSpec([None, 3])}.__getitem__)
    editor = StepEditor(step)
    with editor.subgraph("more") as f:
        taken = f.name(tf.transpose(f.input("a")))
    editor.note({"b:0": tf.TensorSpec([2, 3])})
    made = editor.to_step()
    assert made.spec_of("a:0") == editor.spec("a") == tf.TensorSpec([None, 3])
    assert made.spec_of(taken) == tf.TensorSpec([3, None])
    assert editor.shape("b") == tf.TensorShape([2, 3])
    assert editor.shape("c").rank is None
    with pytest.raises(KeyError):
        step.spec_of(taken)


def test_of_what_kernels_have_made_is_known_what_tensorflow_infers():
    step = CapturedStep(from_text("a = Placeholder()\nb = Neg(a)"), noted={"a:0": tf.TensorSpec([None, 3])}.__getitem__)
    editor = StepEditor(step)
    editor.add_graph(from_text("c = Relu(b, ^a)\nn = Const()"))
    made = editor.to_step()
    assert step.spec_of("b:0") == editor.spec("c") == made.spec_of("c:0") == tf.TensorSpec([None, 3])
    assert editor.spec("n") == made.spec_of("n:0") == tf.TensorSpec([], tf.int32)


def test_an_input_that_the_graph_does_not_have_needs_a_dtype():
    editor = StepEditor(CapturedStep(from_text("a = Placeholder()")))
    with pytest.raises(KeyError, match="b is not a node of the graph"), editor.subgraph("more") as f:
        f.input("b")


def test_running_all_instead_is_running_one_after_the_other_instead(step: Step) -> None:
    one, all_at_once = StepEditor(step), StepEditor(step)
    for old, new in (("check", ["log", "sum"]), ("log", ["double"])):
        one.replace_target(old, new)
    all_at_once.replace_targets({"check": ["log", "sum"], "log": ["double"]})
    made, expected = all_at_once.to_step(), one.to_step()
    assert made.targets == expected.targets == ("double", "sum")
    assert (made.background_nodes, made.standing_nodes) == (expected.background_nodes, expected.standing_nodes)
