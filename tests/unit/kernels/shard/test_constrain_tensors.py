"""ConstrainTensors: layouts of tensors by pattern become constraints, which their readers read."""

from __future__ import annotations

import pytest

from autodist.errors import StrategyError
from autodist.kernels import Context, find_divided
from autodist.kernels.shard.constrain_tensors import ConstrainTensors
from autodist.kernels.shard.lift_meshes import LiftMeshes
from tests.unit.kernels.annotation_text import text_of_annotations
from tests.unit.kernels.in_one_process import Session, assert_same, on_mesh, one_device
from tests.unit.kernels.rewrites import step_of
from tests.unit.kernels.shard.mesh_models import perceptron

STEP = """
w = VarHandleOp(shape=[8, 6])
r = ReadVariableOp(w)
h = Relu(r)
g = Mul(h, h)
return g
"""


def context(step, *tensors, alike=()):
    strategy = on_mesh(step, {"a": 2, "b": 2}, {})
    for pattern, sharding in tensors:
        strategy.mesh.tensors.add(pattern=pattern, sharding=sharding)
    for patterns in alike:
        strategy.mesh.alike.add(patterns=patterns)
    return Context(strategy, 0)


def test_readers_of_a_matched_tensor_read_its_constraint():
    step = step_of(STEP)
    seen = context(step, ("h|x", "[–, b]"))
    made = ConstrainTensors().apply(step, seen)
    nodes = made.graph_index.nodes
    assert list(nodes["g"].input) == ["h/constrained"] * 2 and list(nodes["h/constrained"].input) == ["h"]
    lifted = LiftMeshes().apply(made, seen)
    assert "constraint h/constrained: [–, b] (tensors: 'h|x')" in text_of_annotations(lifted.annotations)
    assert ConstrainTensors().apply(lifted, seen) is lifted


def test_nodes_without_values_and_a_step_without_matches_stay():
    step = step_of(STEP)
    assert ConstrainTensors().apply(step, context(step, ("w|none", "[–, b]"))) is step
    assert ConstrainTensors().apply(step, context(step)) is step


def test_two_patterns_that_disagree_are_refused():
    step = step_of(STEP)
    with pytest.raises(StrategyError, match=r"'h' and '\.' of `tensors` match h and request \[–, b\] and \[a, –\]"):
        ConstrainTensors().apply(step, context(step, ("h", "[–, b]"), (".", "[a, –]")))


def test_a_layout_with_too_many_dimensions_is_refused_with_its_pattern():
    step = step_of(STEP)
    seen = context(step, ("h", "[–, b, a]"))
    with pytest.raises(StrategyError, match=r"\(tensors: 'h'\) has 3 dimensions, but the tensor h/constrained"):
        LiftMeshes().apply(ConstrainTensors().apply(step, seen), seen)


def test_variables_that_patterns_of_alike_match_are_a_group():
    step = step_of(STEP + "u = VarHandleOp(shape=[8, 6])\nmesh mesh = {a: 2, b: 2}\n")
    seen = context(step, alike=[["w", "u"], ["w", "x"]])
    lifted = LiftMeshes().apply(step, seen)
    assert [one.members for one in lifted.annotations.groups.values()] == [("w", "u")]
    assert str(lifted.annotations.groups[0].origins[0]) == "alike: 'w', 'u'"
    assert LiftMeshes().apply(lifted, seen) is lifted


def test_a_step_divided_by_the_layout_of_an_activation_alone_equals_one_device():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {})
    strategy.mesh.tensors.add(pattern="Relu", sharding="[data, model]")
    shardings, _ = find_divided(model.captured.step, Context(strategy, 0))
    assert {name: str(one) for name, one in shardings.items()} == {
        "w1": "[?, model?]", "m1": "[?, model?]", "b1": "[model?]", "w2": "[model?, ?]"
    }  # fmt: skip
    expected = one_device(model.captured, model.step, model.batches)
    assert_same(Session(model.captured, strategy).train(model.batches), expected, 1e-12)
