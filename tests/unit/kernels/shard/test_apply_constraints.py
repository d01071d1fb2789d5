"""ApplyConstraints: how constraints act on their operands and on other readers of these."""

from __future__ import annotations

import pytest

from autodist.graph.step_editor import StepEditor
from autodist.kernels.rule import Facts, Refusal
from autodist.kernels.shard.apply_constraints import ApplyConstraints, TakeSharding
from tests.unit.kernels.rewrites import cases, step_of
from tests.unit.kernels.shard.imports import assert_imports


@cases(
    {
        "an operand takes a closed sharding": """
              x = Placeholder(shape=[4, 6])
              s = AddV2(x, x)
              c = Identity(s)
              mesh mesh = {a: 2, b: 2}
              constraint c: [–, b] (train.py:7)
            + tensor s:0: [–, b] (train.py:7)
        """,
        "not if a dimension is open": """
            x = Placeholder(shape=[4, 6])
            s = AddV2(x, x)
            c = Identity(s)
            mesh mesh = {a: 2, b: 2}
            constraint c: [?, b]
        """,
        "not if it has a sharding already": """
            x = Placeholder(shape=[4, 6])
            s = AddV2(x, x)
            c = Identity(s)
            mesh mesh = {a: 2, b: 2}
            constraint c: [–, b]
            tensor s:0: [a, –]
        """,
        "not if another constraint differs": """
            x = Placeholder(shape=[4, 6])
            s = AddV2(x, x)
            c = Identity(s)
            d = Identity(s)
            mesh mesh = {a: 2, b: 2}
            constraint c: [–, b]
            constraint d: [a, –]
        """,
        "not if a manual region differs": """
            x = Placeholder(shape=[4, 6])
            s = AddV2(x, x)
            c = Identity(s)
            i = Identity(s)
            mesh mesh = {a: 2, b: 2}
            constraint c: [–, b]
            region f over a
            input i of f: [a, –]
        """,
        "the operand of two equal constraints takes the sharding of both": """
              x = Placeholder(shape=[4, 6])
              s = AddV2(x, x)
              c = Identity(s)
              d = Identity(s)
              mesh mesh = {a: 2, b: 2}
              constraint c: [–, b] (train.py:7)
              constraint d: [–, b] (train.py:8)
            + tensor s:0: [–, b] (train.py:7)
        """,
        "an argument of a loop stays free, and its readers read the constraint": """
              x = Placeholder(shape=[4, 6])
              c = Identity(x)
            - y = AddV2(x, x)
            + y = AddV2(c, c)
              return x:0
              mesh mesh = {a: 2, b: 2}
              constraint c: [–, b]
              edge x: z:0 → x:0
        """,
        "so does a read of a variable": """
              w = VarHandleOp(shape=[4, 6])
              r = ReadVariableOp(w)
              c = Identity(r)
            - y = AddV2(r, r)
            + y = AddV2(c, c)
              mesh mesh = {a: 2, b: 2}
              constraint c: [–, b]
              edge w: → r:0
        """,
        "but not if the variable has a sharding": """
            w = VarHandleOp(shape=[4, 6])
            r = ReadVariableOp(w)
            c = Identity(r)
            y = AddV2(r, r)
            mesh mesh = {a: 2, b: 2}
            variable w: [a, –]
            constraint c: [–, b]
            edge w: → r:0 [a, –]
        """,
        "a node on which the constraint waits reads the operand as before": """
            w = VarHandleOp(shape=[4, 6])
            r = ReadVariableOp(w)
            y = AddV2(r, r)
            c = Identity(r, ^y)
            mesh mesh = {a: 2, b: 2}
            constraint c: [–, b]
            edge w: → r:0
        """,
        "readers that were captured after a chain read its result": """
              s = Placeholder(shape=[4, 6])
              c1 = Identity(s)
              c2 = Identity(c1)
            - m = Mul(s, s)
            + m = Mul(c2, c2)
              return s:0
              mesh mesh = {a: 2, b: 2}
              constraint c1: [a, –]
              constraint c2: [–, b]
            + tensor s:0: [a, –]
        """,
        "readers that were captured before it do not": """
              s = Placeholder(shape=[4, 6])
              c1 = Identity(s)
              m = Mul(s, s)
              c2 = Identity(c1)
              mesh mesh = {a: 2, b: 2}
              constraint c1: [a, –]
              constraint c2: [–, b]
            + tensor s:0: [a, –]
        """,
        "a chain ends at a constraint with several readers": """
              s = Placeholder(shape=[4, 6])
              c1 = Identity(s)
              c2 = Identity(c1)
              n = Neg(c1)
              m = Mul(s, s)
              mesh mesh = {a: 2, b: 2}
              constraint c1: [a, –]
              constraint c2: [–, b]
            + tensor s:0: [a, –]
        """,
        "a reader that a constraint waits for is not rewired": """
              s = Placeholder(shape=[4, 6])
              c1 = Identity(s)
              c2 = Identity(c1, ^m)
              m = Mul(s, s)
              mesh mesh = {a: 2, b: 2}
              constraint c1: [a, –]
              constraint c2: [–, b]
            + tensor s:0: [a, –]
        """,
        "nothing is annotated": "x = Placeholder(shape=[4, 6])\nc = Identity(x)\nmesh mesh = {a: 2, b: 2}",
    }
)
def test_constraints_are_applied(text):
    assert_imports(ApplyConstraints(), text)


@pytest.mark.parametrize(
    "lines, reason",
    [
        ("constraint c: [–, b]\nconstraint d: [a, –] (train.py:9)", "another constraint, [a, –] (train.py:9)"),
        ("constraint c: [–, ?]", "a dimension is open"),
        ("constraint c: [–, b]\ntensor x:0: [a, –]", "x:0 has a sharding already"),
    ],
)
def test_a_constraint_that_does_not_decide_has_a_reason(lines, reason):
    step = step_of(f"x = Placeholder(shape=[4, 6])\nc = Identity(x)\nd = Identity(x)\nmesh mesh = {{a: 2}}\n{lines}")
    facts = Facts(step, StepEditor(step))
    answer = TakeSharding().match(facts, facts.editor["c"])
    assert isinstance(answer, Refusal)
    assert reason in answer.reason
