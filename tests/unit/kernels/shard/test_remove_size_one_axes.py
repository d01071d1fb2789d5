"""RemoveSizeOneAxes: shardings without axes of size 1."""

from __future__ import annotations

import numpy as np

from autodist.kernels.shard.remove_size_one_axes import RemoveSizeOneAxes
from tests.unit.kernels.in_one_process import on_mesh, plan, train
from tests.unit.kernels.rewrites import cases
from tests.unit.kernels.shard.imports import assert_imports
from tests.unit.kernels.shard.mesh_models import perceptron


@cases(
    {
        "axes divide no dimension": """
              w = VarHandleOp(shape=[8, 6])
              mesh mesh = {a: 1, b: 2, c: 1, d: 4}
            - variable w: [a·b, c?]
            + variable w: [b, ?]
        """,
        "bars stay for other axes": """
              w = VarHandleOp(shape=[8, 6])
              mesh mesh = {a: 1, b: 2, c: 1, d: 4}
            - variable w: [d·c?, –] !b
            + variable w: [d?, –] !b
        """,
        "a closed dimension without axes has no priority": """
              w = VarHandleOp(shape=[8, 6])
              mesh mesh = {a: 1, b: 2, c: 1, d: 4}
            - variable w: [a p1, c? p2]
            + variable w: [–, ? p2]
        """,
        "bars and partials are dropped": """
              x = Placeholder(shape=[8, 6])
              y = Identity(x)
              mesh mesh = {a: 1, b: 2, c: 1, d: 4}
            - constraint y: [b, –] !a +c
            + constraint y: [b, –]
        """,
        "the axes of a manual region": """
              x = Placeholder(shape=[8, 6])
              i = Identity(x)
              o = Identity(i)
              mesh mesh = {a: 1, b: 2, c: 1, d: 4}
            - region f over b, a
            + region f over b
            - input i of f: [a·b, –]
            + input i of f: [b, –]
              output o of f: [b, –]
        """,
        "a mesh without such axes": """
            w = VarHandleOp(shape=[8, 6])
            mesh mesh = {a: 2, b: 2}
            variable w: [a·b, ?]
        """,
        "nothing is annotated": "w = VarHandleOp(shape=[8, 6])\nmesh mesh = {a: 1, b: 4}",
    }
)
def test_axes_of_size_one_are_removed(text):
    assert_imports(RemoveSizeOneAxes(), text, places=8)


def test_a_model_axis_of_size_one_gives_the_bits_of_all_reduce():
    model = perceptron()
    layouts = {"w1": "[–, model]", "b1": "[model]", "w2": "[model, –]"}
    step = model.captured.step
    found = train(model.captured, on_mesh(step, {"data": 4, "model": 1}, layouts), model.batches)
    expected = train(model.captured, plan(step, 4), model.batches)
    assert found.variables[0].keys() == expected.variables[0].keys()
    for name in expected.variables[0]:
        np.testing.assert_array_equal(found.variable(name), expected.variable(name), err_msg=name)
    np.testing.assert_array_equal(found.outputs, expected.outputs)
