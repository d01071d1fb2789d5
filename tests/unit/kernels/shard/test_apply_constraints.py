"""ApplyConstraints: how constraints act on their operands and on other readers of these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.step_editor import StepEditor
from autodist.kernels import Context, run_pipeline
from autodist.kernels.rule import Facts, Refusal
from autodist.kernels.shard.add_data_flow_edges import AddDataFlowEdges
from autodist.kernels.shard.apply_constraints import ApplyConstraints, TakeSharding
from autodist.kernels.shard.lift_meshes import LiftMeshes
from tests.unit.kernels.annotation_text import annotations_from
from tests.unit.kernels.in_one_process import capture, plan
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


@pytest.mark.parametrize(
    "more, reads",
    [
        ([], {"c": "h", "e": "c", "z": "c"}),
        (["constraint BODY@while/c2: [a, –]"], {"c": "h", "e": "h", "z": "h"}),
        (["tensor BODY@ARGUMENT: [a, –]"], {"c": "h", "e": "h", "z": "h"}),
    ],
)
def test_an_argument_of_a_loop_stays_free_and_the_nodes_of_the_body_read_the_constraint(more, reads):
    def body(i, h):
        c, _ = tf.identity(h, name="c"), tf.identity(h, name="c2")
        return i + 1, tf.add(tf.exp(h, name="e"), tf.add(c, h, name="z"))

    captured = capture(lambda x: tf.while_loop(lambda i, h: i < 3, body, (0, x))[1], np.ones([8, 16])).step
    loop = next(node for node in captured.graph_def.node if "body" in node.attr)
    function = next(f for f in captured.graph_def.library.function if f.signature.name == loop.attr["body"].func.name)
    argument = next(node.input[0] for node in function.node_def if node.name == "while/e")
    lines = ["mesh mesh = {a: 2, b: 2}", "constraint BODY@while/c: [–, b]", *more]
    named = [line.replace("BODY", function.signature.name).replace("ARGUMENT", f"{argument}:0") for line in lines]
    step = replace(captured, annotations=annotations_from(named))
    context = Context(plan(step, 1, 4), 0)
    before = AddDataFlowEdges().apply(step, context)
    made = ApplyConstraints().apply(before, context)
    assert ApplyConstraints().apply(made, context) is made and (made is before) == bool(more)
    found = next(f for f in made.graph_def.library.function if f.signature.name == function.signature.name)
    inputs = {node.name.removeprefix("while/"): list(node.input) for node in found.node_def}
    assert {name: inputs[name][-1] for name in reads} == {
        name: {"h": argument, "c": "while/c:output:0"}[source] for name, source in reads.items()
    }


def test_an_operand_in_a_function_that_is_on_no_edge_takes_a_closed_sharding():
    def body(i, h):
        return i + 1, tf.identity(tf.exp(h, name="e"), name="c") + h

    captured = capture(lambda x: tf.while_loop(lambda i, h: i < 3, body, (0, x))[1], np.ones([8, 16])).step
    name = next(node.attr["body"].func.name for node in captured.graph_def.node if "body" in node.attr)
    lines = ["mesh mesh = {a: 2, b: 2}", f"constraint {name}@while/c: [–, b]"]
    step = replace(captured, annotations=annotations_from(lines))
    context = Context(plan(step, 1, 4), 0)
    made = run_pipeline([LiftMeshes(), AddDataFlowEdges(), ApplyConstraints()], step, context)
    assert list(made.annotations.tensors) == [f"{name}@while/e:0"]
    assert made.graph_def is step.graph_def
