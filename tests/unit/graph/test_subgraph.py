"""SubgraphBuilder: nodes built with TensorFlow's API join the edited graph as if created there."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.subgraph import Template, subgraph
from tests.unit.graph.graph_text import assert_imports, assert_text, from_text

GRAPH = "a = Placeholder()\ns = Split(axis, a)\naxis = 0\nb = Neg(a)"


@pytest.fixture
def editor():
    return GraphEditor(from_text(GRAPH))


def test_what_is_built_stands_under_the_prefix(editor):
    with subgraph(editor, "half") as f:
        made = tf.raw_ops.Neg(x=f.input("s:1", tf.float32), name="neg")
    assert f.made == ("autodist/half/neg",)
    assert f.name(made) == "autodist/half/neg:0"
    assert_text(editor.to_graph_def(), GRAPH + "\nautodist/half/neg = Neg(s:1)")
    assert_imports(editor.to_graph_def())


def test_nothing_built_changes_nothing(editor):
    with subgraph(editor, "none") as f:
        f.input("a", tf.float32)
        f.after(["b"])
    assert f.made == ()
    assert_text(editor.to_graph_def(), GRAPH)


def test_one_tensor_is_one_input_however_it_is_spelled(editor):
    with subgraph(editor, "twice") as f:
        assert f.input("a", tf.float32) is f.input("a:0", tf.float32)


def test_an_input_keeps_its_own_name(editor):
    with subgraph(editor, "same") as f:
        given = f.input("s:1", tf.float32)
    assert f.name(given) == "s:1"


def test_later_outputs_keep_their_index(editor):
    with subgraph(editor, "split") as f:
        first, second = tf.split(f.input("a", tf.float32, [4]), 2)
        total = tf.raw_ops.AddV2(x=second, y=first, name="sum")
    assert f.name(second).endswith(":1")
    split = f.name(first).removesuffix(":0")
    assert list(editor["autodist/split/sum"].input) == [f"{split}:1", split]
    assert f.name(total.op) == "autodist/split/sum"


def test_operations_wait_for_nodes_of_the_edited_graph(editor):
    with subgraph(editor, "wait") as f, tf.control_dependencies([f.after(["b", "s"])]):
        tf.raw_ops.Neg(x=f.input("a", tf.float32), name="neg")
    assert list(editor["autodist/wait/neg"].input) == ["a", "^b", "^s"]


def test_to_wait_for_an_input_is_to_wait_for_its_node(editor):
    with subgraph(editor, "wait") as f, tf.control_dependencies([f.input("s:1", tf.float32).op]):
        tf.no_op(name="done")
    assert list(editor["autodist/wait/done"].input) == ["^s"]


def test_inputs_stand_on_no_device_and_wait_for_nothing(editor):
    with subgraph(editor, "placed") as f, tf.device("/cpu:0"), tf.control_dependencies([f.after(["b"])]):
        tf.raw_ops.Neg(x=f.input("a", tf.float32), name="neg")
    assert "CPU" in editor["autodist/placed/neg"].device.upper()
    assert list(editor["a"].input) == []


def test_many_inputs_are_those_of_one_operation_and_keep_their_own_names_dtypes_and_shapes(editor):
    names, like = ["s:1", "a", "b"], [tf.TensorSpec([2]), tf.TensorSpec([], tf.int32), tf.TensorSpec(None, tf.float64)]
    with subgraph(editor, "many") as f:
        found = f.inputs_like(names, like)
        tf.raw_ops.Pack(values=[found[0], found[0]], name="first")
        with tf.control_dependencies([found[1]]):
            tf.no_op(name="last")
    assert [(t.dtype, t.shape) for t in found[:2]] == [(t.dtype, t.shape) for t in like[:2]]
    assert found[2].dtype == tf.float64 and found[2].shape.rank is None
    assert [f.name(t) for t in found] == ["s:1", "a:0", "b:0"]
    assert f.made == ("autodist/many/first", "autodist/many/last")
    assert list(editor["autodist/many/first"].input) == ["s:1", "s:1"]
    assert list(editor["autodist/many/last"].input) == ["^s", "^a", "^b"]


def test_a_copy_of_a_node_stands_in_the_order_in_which_it_was_added(editor):
    like = from_text("any = AddV2()").node[0]
    with subgraph(editor, "copy") as f:
        before = tf.raw_ops.Neg(x=f.input("a", tf.float32), name="before")
        with tf.device("/cpu:0"), tf.control_dependencies([before]):
            copy = f.add(like, "copy", ["s:0", f.name(before)], [f.after(["b"])])
        tf.raw_ops.Neg(x=f.input(f"{copy.name}:0", tf.float32), name="behind")
    assert f.made == ("autodist/copy/before", "autodist/copy/copy", "autodist/copy/behind")
    assert list(editor["autodist/copy/copy"].input) == ["s", "autodist/copy/before", "^b"]
    assert editor["autodist/copy/copy"].device == ""
    assert list(editor["autodist/copy/behind"].input) == ["autodist/copy/copy"]


def test_functions_are_brought_along(editor):
    with subgraph(editor, "call") as f:
        tf.function(lambda x: x * 2.0)(f.input("a", tf.float32, []))
    assert len(editor.library.function) == 1
    assert_imports(editor.to_graph_def())


def test_an_error_inside_leaves_the_graph_as_it_was(editor):
    def build():
        with subgraph(editor, "broken") as f:
            tf.raw_ops.Neg(x=f.input("a", tf.float32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert_text(editor.to_graph_def(), GRAPH)


def test_a_template_is_spliced_on_other_tensors_each_time(editor):
    template = Template(
        [tf.float32, tf.float32],
        lambda x, y: [tf.raw_ops.Sub(x=x, y=y, name="less"), y],
    )
    assert template.splice(editor, "first", ["s:1", "a"]) == ["autodist/first/less:0", "a:0"]
    assert template.splice(editor, "second", ["b", "autodist/first/less:0"]) == [
        "autodist/second/less:0", "autodist/first/less:0",
    ]  # fmt: skip
    made = "\nautodist/first/less = Sub(s:1, a)\nautodist/second/less = Sub(b, autodist/first/less)"
    assert_text(editor.to_graph_def(), GRAPH + made)
    assert_imports(editor.to_graph_def())
