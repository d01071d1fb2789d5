"""UniteGroups: sharding groups become disjoint, and their members are sharded alike."""

from __future__ import annotations

import pytest

from autodist.errors import StrategyError
from autodist.kernels.shard.unite_groups import UniteGroups
from tests.unit.kernels.rewrites import cases
from tests.unit.kernels.shard.imports import assert_imports, imported


@cases(
    {
        "groups with a common member are one": """
              x = Placeholder(shape=[4, 6])
              y = Neg(x)
              c = Identity(y)
              mesh mesh = {a: 2, b: 2}
              constraint c: [?, ?]
            - group 0: x:0, y:0 (train.py:7)
            - group 1: x:0 (train.py:8)
            - group 2: y:0 (train.py:9)
            + group 0: x:0, y:0 (train.py:7) (train.py:8) (train.py:9)
        """,
        "groups are numbered in the order of the step": """
              x = Placeholder(shape=[4, 6])
              y = Neg(x)
              c = Identity(y)
              mesh mesh = {a: 2, b: 2}
              constraint c: [?, ?]
            - group 89: y (train.py:8)
            - group 12: x:0 (train.py:7)
            + group 0: x:0 (train.py:7)
            + group 1: y:0 (train.py:8)
        """,
        "a sharding of one member is that of all": """
              q = VarHandleOp(shape=[4, 6])
              k = VarHandleOp(shape=[4, 6])
              v = VarHandleOp(shape=[4, 6])
              rq = ReadVariableOp(q)
              rk = ReadVariableOp(k)
              rv = ReadVariableOp(v)
              x = Placeholder(shape=[4, 6])
              y = Neg(x)
              mesh mesh = {a: 2, b: 2}
              variable q: [–, b] (cluster.yml:5)
            + variable k: [–, b] (cluster.yml:5)
            + variable v: [–, b] (cluster.yml:5)
            + tensor x:0: [–, b] (cluster.yml:5)
              edge q: → rq:0 [–, b] (cluster.yml:5)
            - edge k: → rk:0
            + edge k: → rk:0 [–, b] (cluster.yml:5)
            - edge v: → rv:0
            + edge v: → rv:0 [–, b] (cluster.yml:5)
            - edge y:0: x:0 → y:0
            + edge y:0: x:0 → y:0 [?, b?] (cluster.yml:5)
            - group 0: q, k (cluster.yml:9)
            - group 1: k, v, x, y (cluster.yml:9)
            + group 0: q, k, v, x:0, y:0 (cluster.yml:9)
        """,
        "members with different shardings get an open constraint": """
              w = VarHandleOp(shape=[4, 6])
              r = ReadVariableOp(w)
              x = Placeholder(shape=[4, 6])
            - y = Neg(x)
            + y = Neg(autodist/unite_groups/x_0)
            - z = Neg(r)
            + z = Neg(autodist/unite_groups/r_0)
            + autodist/unite_groups/x_0 = Identity(x)
            + autodist/unite_groups/r_0 = Identity(r)
              mesh mesh = {a: 2, b: 2}
              variable w: [–, b] (cluster.yml:5)
              tensor x:0: [a, –] (train.py:7)
              edge w: → r:0 [–, b] (cluster.yml:5)
            - group 0: w, x:0 (train.py:8)
            + group 0: autodist/unite_groups/r_0:0, autodist/unite_groups/x_0:0 (train.py:8)
            + constraint autodist/unite_groups/r_0: [?, ?] (train.py:8)
            + constraint autodist/unite_groups/x_0: [?, ?] (train.py:8)
        """,
        "nothing is annotated": "x = Placeholder(shape=[4, 6])\nmesh mesh = {a: 2, b: 2}\ngroup 3: x:0",
    }
)
def test_groups_are_united(text):
    assert_imports(UniteGroups(), text)


TWO = """
x = Placeholder(shape=[4, 6])
y = Placeholder(shape=[4, 8])
n = Neg(x)
mesh mesh = {a: 2, b: 2}
tensor y:0: [a, –]
"""


@pytest.mark.parametrize(
    "lines, message",
    [
        (
            "group 0: x:0, y:0 (train.py:8)",
            r"the sharding group of x:0 and y:0 \(train.py:8\), the shapes are \(4, 6\) and \(4, 8\)",
        ),
        (
            "group 0: x:0, n:0 (train.py:8)\nregion f over a\nbody of f: n",
            r"\(train.py:8\), x:0 is outside of manual regions, but n:0 is in the manual region f",
        ),
    ],
)
def test_a_group_of_unlike_tensors_is_refused(lines, message):
    with pytest.raises(StrategyError, match=message):
        imported(UniteGroups(), TWO + lines)


def test_different_shardings_in_a_group_are_warned_of(caplog):
    imported(UniteGroups(), TWO + "tensor x:0: [–, b] (train.py:5)\ntensor n:0: [a, –]\ngroup 0: x:0, n:0 (train.py:8)")
    assert "a sharding group (train.py:8) have different shardings, x:0 has [–, b] (train.py:5) and n:0" in caplog.text


def test_members_that_do_not_exist_are_warned_of(caplog):
    step = imported(UniteGroups(), TWO + "group 0: x:0, lost:0 (train.py:8)")
    assert step.annotations.groups[0].members == ("x:0",)
    assert "the step has no lost:0, a member of a sharding group (train.py:8)" in caplog.text
