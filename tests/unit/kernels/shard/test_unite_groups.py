"""UniteGroups: sharding groups become disjoint, and their members are sharded alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.kernels import Context, run_pipeline
from autodist.kernels.pipeline import IMPORT_PASSES
from autodist.kernels.shard.unite_groups import UniteGroups
from tests.unit.kernels.annotation_text import annotations_from
from tests.unit.kernels.in_one_process import capture, plan
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


def test_the_slots_of_a_group_of_variables_get_its_sharding():
    q, k, v, alone = (tf.Variable(np.ones([4, 6]), name=name) for name in ("q", "k", "v", "alone"))
    slots = {name: tf.Variable(np.zeros([4, 6]), name=f"{name}/momentum") for name in ("q", "k", "v", "alone")}

    def step(x):
        variables = [q, k, v, alone]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(tf.square(x @ one)) for one in variables])
        gradients = tape.gradient(loss, variables)
        for one, slot, gradient in zip(variables, slots.values(), gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            one.assign_sub(0.1 * slot)
        return loss

    lines = ["mesh mesh = {a: 2, b: 2}", "variable q: [–, b]", "group 0: q, k", "group 1: k, v"]
    captured = capture(step, np.ones([2, 4])).step
    given = replace(captured, annotations=annotations_from(lines))
    made = run_pipeline(IMPORT_PASSES, given, Context(plan(given, 1, 4), 0)).annotations
    found = {edge.owner: edge.sharding and str(edge.sharding) for edge in made.edges}
    alike = {name: "[–, b]" for one in "qkv" for name in (one, f"{one}/momentum")}
    assert found == alike | {"alone": None, "alone/momentum": None}
    assert {name: str(one.sharding) for name, one in made.variables.items()} == dict.fromkeys("qkv", "[–, b]")
    assert [group.members for group in made.groups.values()] == [("q", "k", "v")]


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
