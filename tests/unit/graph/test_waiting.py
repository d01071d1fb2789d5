"""Waiting: dependencies between nodes after the nodes between them are removed."""

from __future__ import annotations

import pytest

from autodist.graph.editor import GraphEditor
from autodist.graph.index import GraphIndex
from autodist.graph.waiting import free_constants, nearest_before, redirect_control_inputs
from tests.unit.graph.graph_text import from_text

GRAPH = """
    v = VarHandleOp()
    x = Placeholder()
    read = ReadVariableOp(v)
    late = ReadVariableOp(v, ^read)
    far = Mul(x, read)
    near = Neg(far, ^late)
    write = AssignVariableOp(v, x, ^near)
    done = NoOp(^write)
"""


@pytest.mark.parametrize(
    "kept, inputs",
    [
        ({"write", "near"}, ["v", "x", "^near"]),  # no node is removed
        ({"write", "late"}, ["v", "x", "^late"]),
        ({"write", "read"}, ["v", "x", "^read"]),
        ({"write", "late", "read"}, ["v", "x", "^late", "^read"]),
        ({"write", "x", "v"}, ["v", "x"]),  # these are always complete
    ],
)
def test_a_node_waits_for_the_nearest_that_are_kept(kept, inputs):
    editor = GraphEditor(from_text(GRAPH))
    redirect_control_inputs(editor, kept)
    assert sorted(editor["write"].input) == sorted(inputs)
    assert list(editor["done"].input) == ["^write"]


def test_what_lies_behind_a_kept_node_is_not_looked_at():
    assert nearest_before(GraphEditor(from_text(GRAPH)), "done", {"write", "read"}) == {"write"}


def test_a_constant_waits_for_its_branch_and_for_nothing_else():
    """Without the dependency, both constants would have a value, and Merge would return whichever comes first."""
    graph = from_text("""
        x = Placeholder()
        p = Placeholder()
        switch = Switch(p, p)
        yes = Identity(switch:1)
        one = Const(^yes)
        no = Identity(switch)
        two = Const(^no)
        merge = Merge(two, one)
        rate = Const(^x)
        out = Mul(merge, rate)
    """)
    editor, graph_index = GraphEditor(graph), GraphIndex(graph)
    free_constants(editor, graph_index, ())
    assert list(editor["one"].input) == ["^yes"] and list(editor["two"].input) == ["^no"]
    assert not editor["rate"].input and "^x" in editor["out"].input


def test_the_readers_of_a_concatenation_wait_for_what_its_constants_waited_for():
    """TensorFlow's constant folding breaks a ConcatV2 that has control inputs."""
    graph = from_text("""
        x = Placeholder()
        check = NoOp()
        one = Const(^check)
        axis = Const()
        shape = ConcatV2(one, one, x, axis)
        twice = ConcatV2(shape, shape, one, axis)
        out = Reshape(x, twice)
        fetched = ConcatV2(one, one, x, axis)
    """)
    editor, graph_index = GraphEditor(graph), GraphIndex(graph)
    free_constants(editor, graph_index, {"fetched"})
    assert not editor["one"].input
    assert [list(editor[n].input) for n in ("shape", "twice")] == [
        ["one", "one", "x", "axis"],
        ["shape", "shape", "one", "axis"],
    ]
    assert list(editor["out"].input) == ["x", "twice", "^check"]
    assert list(editor["fetched"].input) == ["one", "one", "x", "axis", "^check"]
