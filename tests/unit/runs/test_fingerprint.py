"""Fingerprints: equal if two workers captured the same step, and otherwise the first difference."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from autodist.errors import CaptureMismatchError
from autodist.graph.baked_values import Baked
from autodist.graph.parts import Variable, VariableGradient
from autodist.graph.step import CapturedStep
from autodist.kernels import Context, rewrite
from autodist.runs.fingerprint import Fingerprint, require_equal
from tests.unit.graph.graph_text import from_text
from tests.unit.kernels.in_one_process import CapturedFunction, capture, plan

V = Variable("w", "v", (2, 3), tf.float32, trainable=True)
READ = "a = Placeholder()\nv = VarHandleOp()\nr = ReadVariableOp(v)"
ITEM = CapturedStep(
    from_text(f"{READ}\ng = Neg(r)"),
    variables=(V,),
    gradients=(VariableGradient("w", ("g:0",), 0),),
)


def with_text(text):
    return ITEM.with_graph(from_text(text))


def with_variable(**changes):
    return replace(ITEM, variables=(replace(V, **changes),))


def test_the_same_step_passes():
    require_equal(Fingerprint.of(ITEM), Fingerprint.of(ITEM), "worker 1")


def constant(value):
    """Returns a step whose gradient is multiplied by a constant."""
    graph_def = from_text(f"{READ}\nc = Const()\nm = Mul(r, c)\ng = Neg(m)")
    node = next(n for n in graph_def.node if n.name == "c")
    node.attr["dtype"].type = tf.as_dtype(np.asarray(value).dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return ITEM.with_graph(graph_def)


def test_a_constant_that_differs_is_refused_with_both_values_and_its_reader():
    with pytest.raises(CaptureMismatchError) as told:
        require_equal(*map(Fingerprint.of, (constant(0.1), constant(0.3))), name="worker 1", step=constant(0.3))
    assert "chief:  0.1 (float32)\n    here:   0.3 (float32)\nIt is the constant c, which m reads." in str(told.value)


def test_an_array_that_differs_gets_a_warning(caplog):
    own = [Fingerprint.of(constant(np.full(shape, value))) for shape, value in (([5, 2], 1.0), ([4, 2], 2.0))]
    require_equal(*own, name="worker 1")
    (record,) = caplog.records
    assert "worker 1 has another array in its step than the chief" in record.getMessage()
    assert "here:" in record.getMessage() and "(float64 array of shape (4, 2))" in record.getMessage()


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


def test_nodes_missing_on_the_chief_are_reported_too():
    short, long = with_text("a = Placeholder()"), with_text("a = Placeholder()\nb = Neg(a)")
    with pytest.raises(CaptureMismatchError, match=r"chief:  \(nothing more\)"):
        require_equal(Fingerprint.of(short), Fingerprint.of(long), "worker 1")


def captured_after(layers: int) -> CapturedFunction:
    """A step of a network in a process that has made some layers before."""
    keras.utils.clear_session(free_memory=False)
    for _ in range(layers):
        keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    return capture(step, np.ones((4, 3), np.float32))


def test_names_that_are_counted_up_may_differ_and_the_chiefs_are_taken():
    chief, mine = (captured_after(layers).step for layers in (3, 0))
    assert {v.name for v in chief.variables} != {v.name for v in mine.variables}
    renaming = require_equal(Fingerprint.of(chief), Fingerprint.of(mine), "worker 1")
    renamed = renaming.step(mine)
    assert Fingerprint.of(renamed) == Fingerprint.of(chief)
    for one in ("variables", "gradients", "gradient_calls", "inputs", "outputs", "targets"):
        assert getattr(renamed, one) == getattr(chief, one)
    assert [renamed.spec_of(name) for name in renamed.outputs] == [mine.spec_of(name) for name in mine.outputs]
    strategy = plan(chief, 2, 1, {next(v.name for v in chief.variables if v.trainable): 1})
    theirs, ours = (rewrite(item, Context(strategy, 1)) for item in (chief, renamed))
    assert {n.name: (n.op, *n.input) for n in theirs.graph_def.node} == {
        n.name: (n.op, *n.input) for n in ours.graph_def.node
    }


def test_numbered_names_hide_no_other_difference():
    text = "a_{0} = Placeholder()\nb = Placeholder()\nc = Neg({1})"
    with pytest.raises(CaptureMismatchError, match=r"chief:  node c = Neg\(a_1\)\n    here:   node c = Neg\(b\)"):
        require_equal(*(Fingerprint.of(with_text(text.format(*n))) for n in ((1, "a_1"), (2, "b"))), name="worker 1")
    require_equal(*(Fingerprint.of(with_text(text.format(n, f"a_{n}"))) for n in (1, 2)), name="worker 1")


def test_a_graph_that_has_the_same_names_is_renamed_in_nothing():
    assert not require_equal(Fingerprint.of(ITEM), Fingerprint.of(ITEM), "worker 1")


texts = st.text()
listed = st.lists(texts).map(tuple)


@given(
    st.lists(st.tuples(texts, texts)).map(tuple),
    st.lists(st.tuples(texts, listed)).map(tuple),
    st.lists(st.tuples(texts, texts, listed)).map(tuple),
    st.lists(st.tuples(texts, texts)).map(tuple),
    st.lists(st.builds(Baked, st.integers(), texts, texts, texts, st.none() | st.tuples(st.integers()))).map(tuple),
    listed,
    st.binary(),
)
def test_a_message_is_unpacked_to_what_was_packed(variables, gradients, nodes, apart, values, lengths, content):
    packed = Fingerprint(variables, gradients, nodes, apart, (), values, lengths)
    assert Fingerprint.unpack(packed.packed_with(content)) == (packed, content)
