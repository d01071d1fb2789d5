"""The conditions that a step must meet after a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.graph.verify import verify
from autodist.placement.group import Group
from tests.unit.graph.graph_text import from_text
from tests.unit.graph.replicated import replicated

GRAPH = from_text("""
    a = Placeholder()
    b = Neg(a)
    c = Mul(a, b)
    d = NoOp(^c)
""")
REDUCTION = PendingReduction(
    "c/0",
    PendingReductionKind.GRADIENT,
    ("b:0",),
    ("c:0",),
    None,
    1,
    tf.float32,
    tf.TensorShape(None),
    Group.of_workers([0, 1]),
)
STEP = replicated(GRAPH, inputs={"a:0": 0}, outputs=("c:0",), targets=("d",), initializers={"k": "d"})


def _reducing(pending):
    return {"reductions": (pending,)}


def test_a_whole_step_passes():
    verify(STEP)
    verify(replace(STEP, **_reducing(REDUCTION)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"targets": ("e",)}, "the target e is not"),
        ({"background_nodes": ("e",)}, "the background node e is not"),
        ({"standing_nodes": ("e",)}, "the standing node e is not"),
        ({"initializers": {"k": "e"}}, "the initializer e is not"),
        ({"inputs": {"e:0": 0}}, "the input e:0 is not"),
        ({"outputs": ("c:1",)}, "the output c:1 is not"),
        ({"outputs": ("d:0",)}, "the output d:0 is not"),
        (_reducing(replace(REDUCTION, local=("e:0",))), "of the reduction c/0 the local tensor e:0 is not"),
        (_reducing(replace(REDUCTION, result=("e:0",))), "of the reduction c/0 the result e:0 is not"),
        (_reducing(replace(REDUCTION, weight="e:0")), "of the reduction c/0 the weight e:0 is not"),
        (_reducing(replace(REDUCTION, dtype=tf.float64)), "is of float64, but the replicas' values are of float32"),
        ({"graph_def": from_text("a = Placeholder()\nc = Neg(b)")}, "TensorFlow does not accept"),
        ({"noted": {"b:0": tf.TensorSpec(None, tf.int32)}.__getitem__}, "b:0 is recorded as int32.*infers float32"),
    ],
)
def test_what_is_missing_is_named(change, told):
    with pytest.raises(RewriteError, match=told):
        verify(replace(STEP, **change))
