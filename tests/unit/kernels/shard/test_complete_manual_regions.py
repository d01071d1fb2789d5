"""CompleteManualRegions: the normal form of manual regions, and regions that have none."""

from __future__ import annotations

import pytest

from autodist.errors import StrategyError
from autodist.kernels.shard.complete_manual_regions import CompleteManualRegions
from tests.unit.kernels.rewrites import cases
from tests.unit.kernels.shard.imports import assert_imports, imported


@cases(
    {
        "axes are in mesh order, and each sharding names all of them": """
              x = Placeholder(shape=[8])
              i = Identity(x)
              n = Neg(i)
              o = Identity(n)
              mesh mesh = {c: 2, a: 2, b: 2}
            - region f over b, a, c
            + region f over c, a, b
            - input i of f: [c?]
            + input i of f: [c?] !a !b
            - output o of f: [c?] !b
            + output o of f: [c?] !a !b
              body of f: n
        """,
        "an output that is whole along all axes": """
              x = Placeholder(shape=[8])
              i = Identity(x)
              n = Neg(i)
              o = Identity(n)
              mesh mesh = {c: 2, a: 2, b: 2}
            - region f over b, a, c
            + region f over c, a, b
            - input i of f: [c?]
            + input i of f: [c?] !a !b
            - output o of f: [–]
            + output o of f: [–] !c !a !b
              body of f: n
        """,
        "a region in normal form": """
            x = Placeholder(shape=[8])
            i = Identity(x)
            n = Neg(i)
            o = Identity(n)
            mesh mesh = {c: 2, a: 2, b: 2}
            region f over c, a
            input i of f: [c·a·b]
            output o of f: [b] !c !a
            body of f: n
        """,
        "a region without axes, inputs and outputs": """
            x = Placeholder(shape=[8])
            n = Neg(x)
            mesh mesh = {a: 2, b: 2}
            region f
            body of f: n
        """,
        "an input passes the value of a divided variable": """
            w = VarHandleOp(shape=[8])
            r = ReadVariableOp(w)
            i = Identity(r)
            n = Neg(i)
            o = Identity(n)
            mesh mesh = {a: 2, b: 2}
            variable w: [a]
            region f over a
            input i of f: [a]
            output o of f: [a]
            body of f: n
        """,
        "nothing is annotated": "x = Placeholder(shape=[8])\nmesh mesh = {a: 2, b: 2}",
    }
)
def test_regions_are_completed(text):
    assert_imports(CompleteManualRegions(), text, places=8)


BODY = """
w = VarHandleOp(shape=[6, 4])
x = Placeholder(shape=[6, 4])
c = Identity(x)
i = Identity(x)
n = Neg(i)
o = Identity(n)
mesh mesh = {a: 2, b: 2}
region f over a (train.py:7)
"""


@pytest.mark.parametrize(
    "text, message",
    [
        (
            BODY + "input i of f: [b·a, –] (train.py:8)\noutput o of f: [–, –] (train.py:8)\nbody of f: n",
            r"i \(train.py:8\) has the manual axis a behind the free axis b, but the manual region \(train.py:7\)",
        ),
        (
            BODY.replace("[6, 4]", "[5, 4]") + "input i of f: [a, –] (train.py:8)\nbody of f: n",
            r"\(5, 4\), divides the length 5 into 2 parts of the manual region \(train.py:7\)",
        ),
        (BODY + "body of f: n", r"region f \(train.py:7\) has axes and nodes, but neither inputs nor outputs"),
        (
            BODY.replace("over a", "over d") + "input i of f: [–, –]\nbody of f: n",
            r"region f \(train.py:7\) has the axis d, but the mesh \{a: 2, b: 2\} has a, b",
        ),
        (
            BODY.replace("n = Neg(i)", "r = ReadVariableOp(w)\nn = AddV2(i, r)")
            + "input i of f: [a, –]\nbody of f: n, r\nvariable w: [a, –] (cluster.yml:5)",
            r"region f \(train.py:7\) reads w, which has the sharding \[a, –\] \(cluster.yml:5\)",
        ),
        (
            BODY.replace("n = Neg(i)", "r = ReadVariableOp(w)\ns = Identity(r)\nn = AddV2(i, s)")
            + "input i of f: [a, –]\nbody of f: n\nvariable w: [a, –] (cluster.yml:5)",
            r"region f \(train.py:7\) reads w, which has the sharding \[a, –\] \(cluster.yml:5\)",
        ),
        (
            BODY.replace("n = Neg(i)", "n = AddV2(i, c)")
            + "input i of f: [a, –]\nbody of f: n\nconstraint c: [a, –] (train.py:5)",
            r"region f \(train.py:7\) reads c:0, which has the sharding \[a, –\] \(train.py:5\)",
        ),
    ],
)
def test_a_region_without_a_normal_form_is_refused_with_both_places(text, message):
    with pytest.raises(StrategyError, match=message):
        imported(CompleteManualRegions(), text)


def test_a_region_may_read_what_is_whole():
    text = BODY.replace("n = Neg(i)", "r = ReadVariableOp(w)\nn = AddV2(i, r)")
    imported(CompleteManualRegions(), text + "input i of f: [a, –]\nbody of f: n, r\nvariable w: [–, –]")
