"""Walks: the nodes that come before others."""

from __future__ import annotations

from autodist.graph.index import GraphIndex
from autodist.graph.walks import writes_before
from tests.unit.graph.graph_text import from_text


def test_the_writes_before_a_node_are_those_of_the_variable_that_its_inputs_wait_for():
    index = GraphIndex(
        from_text("""
            v = VarHandleOp()
            w = VarHandleOp()
            a = Const()
            first = AssignVariableOp(v, a)
            other = AssignVariableOp(w, a, ^first)
            read = ReadVariableOp(v, ^other)
            second = AssignAddVariableOp(v, read)
            third = AssignAddVariableOp(v, a, ^second)
        """)
    )
    assert writes_before(index, "first", "v") == []
    assert writes_before(index, "read", "v") == ["first"]
    assert writes_before(index, "third", "v") == ["first", "second"]
    assert writes_before(index, "third", "w") == ["other"]
