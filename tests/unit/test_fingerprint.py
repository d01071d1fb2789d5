"""Fingerprints: whether two workers captured the same step, and where they differ first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from autodist.errors import CaptureMismatchError
from autodist.fingerprint import Fingerprint, require_equal
from autodist.graph.item import GraphItem
from autodist.graph.parts import Gradient, Variable
from tests.unit.graph.graph_text import from_text

V = Variable("w", "v", (2, 3), tf.float32, trainable=True)
READ = "a = Placeholder()\nv = VarHandleOp()\nr = ReadVariableOp(v)"
ITEM = GraphItem(
    from_text(f"{READ}\ng = Neg(r)"),
    variables=(V,),
    gradients=(Gradient("w", ("g:0",), 0),),
)


def with_text(text):
    return ITEM.with_graph(from_text(text))


def with_variable(**changes):
    return replace(ITEM, variables=(replace(V, **changes),))


def test_the_same_step_passes():
    require_equal(Fingerprint.of(ITEM), Fingerprint.of(ITEM), "worker 1")


def test_constants_may_differ():
    other = tf.compat.v1.GraphDef()
    other.CopyFrom(from_text("c = Const()"))
    other.node[0].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(7, tf.int32))
    require_equal(Fingerprint.of(with_text("c = Const()")), Fingerprint.of(ITEM.with_graph(other)), "worker 1")


@pytest.mark.parametrize(
    "other, chief, here",
    [
        (with_variable(shape=(3, 2)), "variable w (2, 3) float32", "variable w (3, 2) float32"),
        (with_variable(dtype=tf.float64), "variable w (2, 3) float32", "variable w (2, 3) float64"),
        (replace(ITEM, gradients=()), "gradient of w: g:0", "node a = Placeholder()"),
        (with_text(f"{READ}\ng = Square(r)"), "node g = Neg(r)", "node g = Square(r)"),
        (with_text(f"{READ}\ng = Neg(a)"), "node g = Neg(r)", "node g = Neg(a)"),
        (with_text(READ), "node g = Neg(r)", "(nothing more)"),
    ],
    ids=["shape", "dtype", "gradients", "op", "inputs", "shorter"],
)
def test_the_first_difference_is_told(other, chief, here):
    with pytest.raises(CaptureMismatchError) as told:
        require_equal(Fingerprint.of(ITEM), Fingerprint.of(other), "worker 1")
    assert f"chief:  {chief}\n" in str(told.value) and f"here:   {here}\n" in str(told.value)
    assert "worker 1 captured another step" in str(told.value)


def test_what_the_chief_has_no_more_of_is_told_too():
    short, long = with_text("a = Placeholder()"), with_text("a = Placeholder()\nb = Neg(a)")
    with pytest.raises(CaptureMismatchError, match=r"chief:  \(nothing more\)"):
        require_equal(Fingerprint.of(short), Fingerprint.of(long), "worker 1")


@given(st.lists(st.text()), st.binary())
def test_a_message_is_unpacked_to_what_was_packed(lines, content):
    assert Fingerprint.unpack(Fingerprint(tuple(lines)).packed_with(content)) == (Fingerprint(tuple(lines)), content)
