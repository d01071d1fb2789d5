"""Waiting: what waits for what, where the nodes in between are left out."""

from __future__ import annotations

import pytest

from autodist.graph.editor import GraphEditor
from autodist.graph.waiting import nearest_before, wait_past
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
        ({"write", "near"}, ["v", "x", "^near"]),  # nothing is left out
        ({"write", "late"}, ["v", "x", "^late"]),
        ({"write", "read"}, ["v", "x", "^read"]),
        ({"write", "late", "read"}, ["v", "x", "^late", "^read"]),
        ({"write", "x", "v"}, ["v", "x"]),  # these are always done
    ],
)
def test_a_node_waits_for_the_nearest_that_are_kept(kept, inputs):
    editor = GraphEditor(from_text(GRAPH))
    wait_past(editor, kept)
    assert sorted(editor["write"].input) == sorted(inputs)
    assert list(editor["done"].input) == ["^write"]


def test_what_lies_behind_a_kept_node_is_not_looked_at():
    assert nearest_before(GraphEditor(from_text(GRAPH)), "done", {"write", "read"}) == {"write"}
