"""Effects: the variables that a node reads and writes."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.graph.effects import NO_EFFECT, Effect, Effects
from autodist.graph.ops import writes_rows
from tests.unit.graph.graph_text import from_text


def effect_of(graph_def, name):
    return Effects(graph_def).of(next(n for n in graph_def.node if n.name == name))


def traced(function):
    """Returns the graph of `function(v)`; the node `v` is the variable's handle."""
    with tf.Graph().as_default() as graph:
        variable = tf.Variable([1.0, 2.0], name="v", use_resource=True)
        function(variable)
    return graph.as_graph_def()


BOTH = Effect(frozenset({"v"}), frozenset({"v"}))
READ = Effect(reads=frozenset({"v"}))
WRITE = Effect(writes=frozenset({"v"}))


@pytest.mark.parametrize(
    "line, effect",
    {
        "x = ReadVariableOp(v)": READ,
        "x = AssignVariableOp(v, a)": WRITE,
        "x = AssignAddVariableOp(v, a)": BOTH,
        "x = ResourceScatterAdd(v, a, a)": BOTH,
        "x = ResourceGather(v, a)": READ,
        "x = VariableShape(v)": NO_EFFECT,
        "x = SomethingNew(v)": BOTH,
        "x = Neg(a)": NO_EFFECT,
        "x = Neg(a, ^v)": NO_EFFECT,
    }.items(),
)
def test_ops(line, effect):
    assert effect_of(from_text(f"v = VarHandleOp()\na = Placeholder()\n{line}"), "x") == effect


def test_handles_are_followed_through_what_passes_them_on():
    graph_def = from_text("v = VarHandleOp()\ni = Identity(v)\nr = ReadVariableOp(i)\nb = Identity(r)")
    graph_def.node[1].attr["T"].type = tf.resource.as_datatype_enum
    assert effect_of(graph_def, "r") == READ
    assert effect_of(graph_def, "b") == NO_EFFECT


def test_a_branch_that_writes_makes_its_if_a_write():
    graph_def = traced(lambda v: tf.cond(tf.equal(v[0], 1.0), lambda: v.assign_add([1.0, 1.0]), v.read_value))
    kinds = {n.name: n.op for n in graph_def.node}
    (name,) = [n for n, op in kinds.items() if op in ("If", "StatelessIf")]
    assert effect_of(graph_def, name) == BOTH


def test_a_loop_that_reads_is_a_read():
    graph_def = traced(lambda v: tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + v[0]), [0, 0.0]))
    (name,) = [n.name for n in graph_def.node if n.op in ("While", "StatelessWhile")]
    assert effect_of(graph_def, name) == READ


def test_a_nested_call_is_looked_into():
    inner = tf.function(lambda v: v.assign([3.0, 4.0], read_value=False) and None)
    graph_def = traced(lambda v: tf.function(lambda: inner(v))())
    calls = [n.name for n in graph_def.node if "PartitionedCall" in n.op]
    assert [effect_of(graph_def, c) for c in calls] == [WRITE]


def test_scatters_write_some_rows():
    assert writes_rows("ResourceScatterAdd") and writes_rows("ResourceSparseApplyAdagrad")
    assert not writes_rows("AssignAddVariableOp")
