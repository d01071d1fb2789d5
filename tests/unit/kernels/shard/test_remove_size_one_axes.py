"""RemoveSizeOneAxes: shardings without axes of size 1."""

from __future__ import annotations

from autodist.kernels.shard.remove_size_one_axes import RemoveSizeOneAxes
from tests.unit.kernels.rewrites import cases
from tests.unit.kernels.shard.imports import assert_imports


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
