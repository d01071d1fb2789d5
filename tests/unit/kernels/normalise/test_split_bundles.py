"""SplitBundles: an op that only forwards tensors does not make them depend on each other."""

from __future__ import annotations

import pytest

from autodist.graph.parts import VariableGradient
from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context
from autodist.kernels.normalise.split_bundles import SplitBundles
from autodist.proto import strategy_pb2
from tests.unit.graph.graph_text import assert_imports, assert_text, from_text

ALONE = Context(
    strategy_pb2.Strategy(graph_config=strategy_pb2.GraphConfig(replicas=[strategy_pb2.Replica(device="cpu:0")])), 0
)


def split(text, outputs=(), gradients=(), targets=()):
    step = CapturedStep(from_text(text), outputs=tuple(outputs), gradients=tuple(gradients), targets=tuple(targets))
    return SplitBundles().apply(step, ALONE)


def test_a_graph_without_bundles_is_left_as_it_is():
    step = CapturedStep(from_text("a = Placeholder()\nb = Neg(a)"))
    assert SplitBundles().apply(step, ALONE) is step


def test_each_consumer_gets_its_own_tensor():
    found = split(
        """
        a = Placeholder()
        b = Placeholder()
        both = IdentityN(a, b)
        x = Neg(both)
        y = Neg(both:1)
        """,
        targets=["x", "y"],
    )
    assert_text(found.graph_def, "a = Placeholder()\nb = Placeholder()\nx = Neg(a)\ny = Neg(b)")


def test_bundles_of_bundles_are_split():
    found = split(
        "a = Placeholder()\nb = Placeholder()\ni = IdentityN(a, b)\nj = IdentityN(i:1, i)\nx = Neg(j)",
        targets=["x"],
        outputs=["j:1"],
    )
    assert_text(found.graph_def, "a = Placeholder()\nb = Placeholder()\nx = Neg(b)")
    assert found.outputs == ("a:0",)


def test_what_waited_for_a_bundle_waits_for_all_of_it():
    found = split(
        "a = Placeholder()\nb = Placeholder()\nc = Placeholder()\ni = IdentityN(a, b, ^c)\nx = Neg(c, ^i)",
        targets=["x"],
    )
    assert_text(found.graph_def, "a = Placeholder()\nb = Placeholder()\nc = Placeholder()\nx = Neg(c, ^a, ^b, ^c)")
    assert_imports(found.graph_def)


def test_the_order_that_a_bundle_kept_is_kept():
    found = split(
        "a = Placeholder()\nb = Placeholder()\nc = Placeholder()\ni = IdentityN(a, b, ^c)\nx = Neg(i:1)",
        targets=["x"],
    )
    assert_text(found.graph_def, "b = Placeholder()\nc = Placeholder()\nx = Neg(b, ^c)")


def test_gradients_are_those_that_were_bundled():
    found = split(
        "a = Placeholder()\nb = Placeholder()\ni = IdentityN(a, b)\nx = Neg(i:1)",
        gradients=[VariableGradient("v", ("i:1",), 0)],
        targets=["x"],
    )
    assert found.gradients == (VariableGradient("v", ("b:0",), 0),)


@pytest.mark.parametrize("op", ["IdentityN"])
def test_the_item_is_left_alone(op):
    step = CapturedStep(from_text(f"a = Placeholder()\nb = Placeholder()\ni = {op}(a, b)\nx = Neg(i)"), targets=("x",))
    before = step.graph_def.SerializeToString(deterministic=True)
    assert SplitBundles().apply(step, ALONE) is not step
    assert step.graph_def.SerializeToString(deterministic=True) == before
