"""LiftMeshes: one table of meshes, to which shardings refer by name; shardings fit their mesh and their tensor."""

from __future__ import annotations

import pytest

from autodist.errors import StrategyError
from autodist.kernels import Context
from autodist.kernels.shard.lift_meshes import LiftMeshes, lift
from autodist.sharding import Axis, Mesh
from tests.unit.kernels.annotation_text import annotations_from, text_of_annotations
from tests.unit.kernels.in_one_process import on_mesh
from tests.unit.kernels.rewrites import cases, step_of
from tests.unit.kernels.shard.imports import assert_imports, imported

W = "w = VarHandleOp(shape=[8, 6])\nr = ReadVariableOp(w)\nc = Identity(r)\n"


@cases(
    {
        "the mesh of the YAML and that of a LayoutMap are one": """
              w = VarHandleOp(shape=[8, 6])
              mesh mesh = {data: 2, model: 2} (cluster.yml:3)
            - variable w: [–, model] on {data: 2, model: 2} (train.py:7)
            + variable w: [–, model] (train.py:7)
        """,
        "of several names, the first remains": """
              w = VarHandleOp(shape=[8, 6])
              u = VarHandleOp(shape=[8, 6])
              mesh m1 = {a: 2, b: 2}
            - mesh m3 = {a: 2, b: 2}
              variable u: [a, –] on m1
            - variable w: [–, b] on m3
            + variable w: [–, b] on m1
        """,
        "a mesh without axes is named after its place": """
              w = VarHandleOp(shape=[8, 6])
              u = VarHandleOp(shape=[8, 6])
            - variable u: [–, –] on {} over 3
            + variable u: [–, –] on place_3
            - variable w: [–, –] on {} over 1
            + variable w: [–, –] on place_1
            + mesh place_1 = {} over 1
            + mesh place_3 = {} over 3
        """,
        "places in the order of the run need not be listed": """
              w = VarHandleOp(shape=[8, 6])
              mesh mesh = {a: 2, b: 2}
            - variable w: [–, b] on {a: 2, b: 2} over 0, 1, 2, 3
            + variable w: [–, b]
        """,
        "annotations of variables and nodes that a step does not have are missing": """
              w = VarHandleOp(shape=[8, 6])
              mesh mesh = {a: 2, b: 2}
              variable w: [–, b]
            - variable u: [–, b]
            - constraint c: [a, –] (train.py:9)
            + missing u: [–, b]
            + missing c: [a, –] (train.py:9)
        """,
        "dimensions for which a layout says nothing stay whole": """
              w = VarHandleOp(shape=[8, 6])
              mesh mesh = {a: 2, b: 2}
            - variable w: [b]
            + variable w: [b, –]
        """,
        "nothing is annotated": "w = VarHandleOp(shape=[8, 6])\nmesh mesh = {a: 2, b: 2}",
    }
)
def test_meshes_are_lifted(text):
    assert_imports(LiftMeshes(), text)


@pytest.mark.parametrize(
    "before, after",
    [
        (
            ["mesh mesh = {x: 2, y: 4}", "constraint c: [x] on {x: 2, y: 2}"],
            ["mesh mesh = {x: 2, y: 4}", "mesh mesh_0 = {x: 2, y: 2}", "constraint c: [x] on mesh_0"],
        ),
        (
            ["mesh m1 = {x: 2}", "mesh m2 = {y: 2}", "mesh m3 = {x: 2}", "variable v: [x] on m3"],
            ["mesh m1 = {x: 2}", "mesh m2 = {y: 2}", "variable v: [x] on m1"],
        ),
        (
            ["variable v: [–] on {} over 3", "variable w: [–] on {} over 7"],
            [
                "mesh place_3 = {} over 3",
                "mesh place_7 = {} over 7",
                "variable v: [–] on place_3",
                "variable w: [–] on place_7",
            ],
        ),
        (
            ["mesh mesh = {x: 2}", "variable v: [x] on {x: 2} over 1, 0"],
            ["mesh mesh = {x: 2}", "mesh mesh_0 = {x: 2} over 1, 0", "variable v: [x] on mesh_0"],
        ),
        (
            ["mesh mesh_0 = {x: 2}", "variable v: [y] on {y: 2}", "variable w: [z] on {z: 2}"],
            [
                "mesh mesh_0 = {x: 2}", "mesh mesh = {y: 2}", "mesh mesh_1 = {z: 2}",
                "variable v: [y]", "variable w: [z] on mesh_1",
            ],
        ),
    ],
)  # fmt: skip
def test_new_meshes_get_the_first_free_name(before, after):
    assert text_of_annotations(lift(annotations_from(before))) == after


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "mesh mesh = {data: 2} (cluster.yml:3)\nvariable w: [–, model] on {model: 2} (train.py:7)",
            r"two meshes, \{data: 2\} \(cluster.yml:3\) and \{model: 2\} \(train.py:7\)",
        ),
        (
            "mesh mesh = {a: 2, b: 4} (cluster.yml:3)\nvariable w: [–, b]",
            r"mesh \{a: 2, b: 4\} \(cluster.yml:3\) has 8 places, but the run has 4 devices on 1 worker",
        ),
        (
            "variable w: [–, b] on {a: 2, b: 2} over 0, 1, 2, 2 (train.py:7)",
            r"mesh \{a: 2, b: 2\} over 0, 1, 2, 2 \(train.py:7\) has a place twice",
        ),
        (
            "variable w: [–, b] on {a: 2, b: 2} over 1, 2, 3, 4 (train.py:7)",
            r"\(train.py:7\) has the place 4, but the run has 4 devices",
        ),
        ("variable w: [–, b] on other (train.py:7)", r"\(train.py:7\) names the mesh other, which is defined nowhere"),
        (
            "mesh mesh = {a: 2, b: 2} (cluster.yml:3)\nvariable w: [–, modle] (cluster.yml:5)",
            r"\(cluster.yml:5\) has the axis modle, but the mesh \{a: 2, b: 2\} \(cluster.yml:3\) has a, b",
        ),
        (
            "mesh mesh = {a: 2, b: 2}\nvariable w: [b, b] (cluster.yml:5)",
            r"variable w \(cluster.yml:5\) has the axis b twice",
        ),
        (
            "mesh mesh = {a: 2, b: 2}\nvariable w: [b, –] !b (cluster.yml:5)",
            r"variable w \(cluster.yml:5\) has the axis b twice",
        ),
        (
            "mesh mesh = {a: 2, b: 2}\nvariable w: [–, –, b] (cluster.yml:5)",
            r"\(cluster.yml:5\) has 3 dimensions, but the variable w of shape \(8, 6\) has 2",
        ),
        (
            "mesh mesh = {a: 2, b: 2}\nconstraint c: [–, a·b] (train.py:9)",
            r"\(train.py:9\) divides a dimension of c, of shape \(8, 6\), into 4 parts, but 6 is not divisible by 4",
        ),
    ],
)
def test_a_mesh_or_sharding_that_does_not_fit_is_refused_with_both_places(text, message):
    with pytest.raises(StrategyError, match=message):
        imported(LiftMeshes(), W + text)


def test_a_variable_need_not_divide_evenly():
    text = "mesh mesh = {a: 2, b: 2}\nvariable w: [–, a·b]"
    assert "variable w: [–, a·b]" in text_of_annotations(imported(LiftMeshes(), W + text).annotations)


def test_two_axes_of_one_name_are_refused():
    step = annotations_from(["variable w: [–, b]"])
    mesh = Mesh((Axis("b", 2), Axis("b", 2)))
    with pytest.raises(StrategyError, match="two axes of one name"):
        imported(LiftMeshes(), W, annotations=lift_into(step, mesh))


def lift_into(annotations, mesh):
    return annotations.__class__({"mesh": mesh}, annotations.variables)


def test_a_constraint_on_a_node_that_does_not_exist_is_warned_of(caplog):
    imported(LiftMeshes(), W + "mesh mesh = {a: 2, b: 2}\nconstraint lost: [a] (train.py:9)")
    assert "the step has no node lost, so the sharding [a] (train.py:9) has no effect" in caplog.text


def test_the_mesh_and_the_shardings_of_a_strategy_are_annotations():
    step = step_of(W + "variable w: [–, b] on {a: 2, b: 2} (train.py:7)\nconstraint c: [a] (train.py:8)")
    strategy = on_mesh(step, {"a": 2, "b": 2}, {"w": "[–, b]", "absent": "[b]"})
    made = LiftMeshes().apply(step, Context(strategy, 0))
    assert text_of_annotations(made.annotations) == [
        "mesh mesh = {a: 2, b: 2}",
        "variable w: [–, b] (train.py:7)",
        "constraint c: [a, –] (train.py:8)",
        "missing absent: [b] (a test)",
    ]
    assert LiftMeshes().apply(made, Context(strategy, 0)) is made


def test_a_script_and_a_strategy_that_disagree_are_refused_with_both_places():
    step = step_of(W + "variable w: [–, b] on {a: 2, b: 2} (train.py:7)")
    strategy = on_mesh(step, {"a": 2, "b": 2}, {"w": "[b, –]"})
    with pytest.raises(StrategyError, match=r"w has two shardings, \[b, –\] \(a test\) and \[–, b\] \(train.py:7\)"):
        LiftMeshes().apply(step, Context(strategy, 0))
