"""Annotations: their text in dumps, and the tensors that they reach."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.step_text import text_of_notes
from autodist.sharding import Origin, Sharding
from tests.unit.kernels.annotation_text import annotations_from, text_of_annotations
from tests.unit.kernels.rewrites import step_of

LINES = [
    "mesh mesh = {a: 2, b: 2} (cluster.yml:3)",
    "mesh mesh_0 = {} over 3",
    "variable w: [–, b] (cluster.yml:5)",
    "constraint c: [a p1, ?] !b on mesh_0 (train.py:7)",
    "constraint d: [a·b?, –] +b on {b: 2, a: 2} over 1, 0, 2, 3",
    "tensor s:0: [–, b] (train.py:7)",
    "group 0: w, x:0 (cluster.yml:9) (train.py:8)",
    "region f over a, b (train.py:9)",
    "input i of f: [a, ?] !b (train.py:9)",
    "output o of f: [a, ?] !b (train.py:9)",
    "body of f: k, l",
    "edge w: u:0 → r:0, q:0 [–, b] (cluster.yml:5)",
    "edge while:1: x:0, body@y:0 → while:1, body@x:0",
    "edge v: → v_read:0",
    "barrier e",
    "whole while:3: a list of tensors",
    "missing z: [a] (cluster.yml:6)",
]


def test_annotations_have_a_text_from_which_they_follow():
    made = annotations_from(LINES)
    assert text_of_annotations(made) == LINES
    assert annotations_from(text_of_annotations(made)) == made


def test_the_notes_of_a_step_show_its_annotations():
    step = step_of("w = VarHandleOp(shape=[8, 6])")
    shown = LINES[:1] + LINES[2:3]
    assert "annotations" not in text_of_notes(step)
    found = text_of_notes(step_of("w = VarHandleOp(shape=[8, 6])", annotations=annotations_from(shown)))
    assert found == text_of_notes(step) + "annotations\n" + "".join(f"  {line}\n" for line in shown)


def test_each_annotation_knows_the_tensors_that_it_reached():
    assert annotations_from(LINES).reached() == {
        Origin("cluster.yml:5"): ("w", "u:0", "r:0", "q:0"),
        Origin("cluster.yml:6"): (),
        Origin("train.py:7"): ("c:0", "s:0"),
        Origin("train.py:9"): ("i:0", "o:0"),
        Origin("here"): ("d:0",),
    }


def test_shardings_are_changed_in_all_places():
    made = annotations_from(LINES)
    assert made.map(lambda one: one) is made
    changed = made.map(lambda one: replace(one, sharding=Sharding.open(2)))
    assert {str(one.sharding) for _, one in changed.requests()} == {"[?, ?]"}
