"""MergeRows: a worker sends a row once if no node between the gradient and the write depends on repeated rows."""

from __future__ import annotations

from dataclasses import replace

import keras
import pytest
import tensorflow as tf

from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels import KERNELS
from autodist.kernels.base import Context, run_pipeline
from autodist.kernels.rows.merge_rows import MergeRows, is_summed
from tests.unit.graph.graph_text import assert_imports, from_text
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.table_steps import table_step

BEFORE = KERNELS[: [kernel.name for kernel in KERNELS].index("merge-rows")]


def replicated(optimizer, workers=2, replicas=1):
    """A step as it is before rows are merged, and its context."""
    captured, _ = table_step(optimizer)
    context = Context(plan(captured.step, workers, replicas), 0)
    return run_pipeline(BEFORE, captured.step, context), context


def merged(step, context):
    """Returns the names of the reductions whose rows the kernel merged."""
    found = MergeRows().apply(step, context)
    assert_imports(found.graph_def)
    return [old.name for old, new in zip(step.reductions, found.reductions, strict=True) if old.local != new.local]


def test_nothing_travels_on_one_worker():
    step, context = replicated(keras.optimizers.SGD(0.1), workers=1, replicas=2)
    assert MergeRows().apply(step, context) is step


@pytest.mark.parametrize(
    "optimizer",
    {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum, by a sum of segments": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "lion": lambda: keras.optimizers.Lion(0.1),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_rows_that_are_scaled_and_added_are_merged(optimizer):
    step, context = replicated(optimizer[1]())
    assert merged(step, context) == ["table/0"]


@pytest.mark.parametrize(
    "optimizer",
    {
        "squares of each": lambda: keras.optimizers.Adagrad(0.1),
        "squares beside": lambda: keras.optimizers.Adam(0.1),
        "a norm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
        "a global norm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
        "clipping by value": lambda: keras.optimizers.SGD(0.1, clipvalue=0.1),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_rows_on_which_something_depends_one_by_one_are_not(optimizer):
    step, context = replicated(optimizer[1]())
    assert [pending.name for pending in step.reductions if pending.is_sparse] == ["table/0"]
    assert MergeRows().apply(step, context) is step


def test_a_reduction_that_the_step_returns_is_not_merged():
    step, context = replicated(keras.optimizers.SGD(0.1))
    (pending,) = (pending for pending in step.reductions if pending.is_sparse)
    returned = replace(step, outputs=(*step.outputs, pending.result[0]))
    assert MergeRows().apply(returned, context) is returned


ADDED = """
    ids = Placeholder(dtype=int32)
    rows = Placeholder()
    rate = Placeholder()
    v = VarHandleOp()
    scaled = Mul(rows, rate)
    w = ResourceScatterAdd(v, ids, scaled)
"""


def added_up(text, **shapes):
    known = {"rate:0": (), **{f"{name}:0": shape for name, shape in shapes.items()}}
    step = CapturedStep(from_text(text), noted=lambda name: tf.TensorSpec(known[name]))
    return is_summed(StepEditor(step), "ids:0", "rows:0")


def test_rows_scaled_by_one_number_are_added_up():
    assert added_up(ADDED)


@pytest.mark.parametrize(
    "more",
    {
        "scaled row by row": "other = Placeholder()\nt = Mul(rows, other)\nu = ResourceScatterAdd(v, ids, t)",
        "a product of rows": "t = Mul(rows, rows)\nu = ResourceScatterAdd(v, ids, t)",
        "a quotient by rows": "t = RealDiv(rate, rows)\nu = ResourceScatterAdd(v, ids, t)",
        "a number of rows": "n = Size(ids)",
        "a shape": "n = Shape(rows)",
        "other rows": "other = Placeholder()\nu = ResourceScatterAdd(v, other, scaled)",
        "indices with other rows": "other = Placeholder()\nu = ResourceScatterAdd(v, ids, other)",
        "a write of the last": "u = ResourceScatterUpdate(v, ids, scaled)",
    }.items(),
    ids=lambda pair: pair[0],
)
def test_rows_are_not_merged_if_a_node_depends_on_their_number(more):
    assert not added_up(f"{ADDED.strip()}\n{more[1]}", other=(None, 2))


def test_rows_that_nobody_adds_are_not_added_up():
    assert not added_up("ids = Placeholder(dtype=int32)\nrows = Placeholder()")
