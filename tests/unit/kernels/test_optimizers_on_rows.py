"""Keras optimizers on an embedding: equal to one device, at the cost of the rows wherever their maths allows it."""

from __future__ import annotations

import re
from functools import cache

import keras
import pytest

from autodist.kernels.rows.report_table_writes import log_once
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import assert_same, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import sharded_plan
from tests.unit.kernels.table_steps import ROWS, nodes_with_rows, repeated_ids, table_step

optimizers = keras.optimizers

COSTS_ROWS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "sgd, clipped by value": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "sgd, clipped by norm": lambda: optimizers.SGD(0.1, clipnorm=0.1),
    "sgd, clipped by global norm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adagrad, clipped by value": lambda: optimizers.Adagrad(0.1, clipvalue=0.01),
    "adagrad, clipped by global norm": lambda: optimizers.Adagrad(0.1, global_clipnorm=0.1),
}

COSTS_TABLE = {
    "momentum": (lambda: optimizers.SGD(0.1, momentum=0.9), ["table", "momentum"]),
    "nesterov": (lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True), ["table", "momentum"]),
    "rmsprop": (lambda: optimizers.RMSprop(0.01), ["velocity"]),
    "rmsprop, centered": (lambda: optimizers.RMSprop(0.01, centered=True), ["velocity", "average_gradient"]),
    "rmsprop, momentum": (lambda: optimizers.RMSprop(0.01, momentum=0.5), ["table", "velocity", "momentum"]),
    "adadelta": (lambda: optimizers.Adadelta(0.1), ["accumulated_grad", "accumulated_delta_var"]),
    "adam": (lambda: optimizers.Adam(0.01), ["table", "momentum", "velocity"]),
    "adamw": (lambda: optimizers.AdamW(0.01, weight_decay=0.1), ["table", "momentum", "velocity"]),
    "amsgrad": (lambda: optimizers.Adam(0.01, amsgrad=True), ["table", "momentum", "velocity", "velocity_hat"]),
    "nadam": (lambda: optimizers.Nadam(0.01), ["table", "momentum", "velocity"]),
    "adamax": (lambda: optimizers.Adamax(0.01), ["table", "momentum", "norm"]),
    "ftrl": (lambda: optimizers.Ftrl(0.1), ["table", "accumulator", "linear"]),
    "lion": (lambda: optimizers.Lion(0.01), ["table", "momentum"]),
    "adafactor": (lambda: optimizers.Adafactor(0.01), ["velocity"]),
}

SAME_UPDATES = ("sgd, clipped by value", "nesterov", "rmsprop", "rmsprop, centered", "adam", "adamw", "nadam")
"""Their updates of a table are made of the same operations as another optimizer's."""

EVERY = {**COSTS_ROWS, **{name: make for name, (make, _) in COSTS_TABLE.items()}}


LAYOUTS = {
    "2 replicas": lambda step: plan(step, 1, 2),
    "2 workers, server": lambda step: plan(step, 2, 1, {"table": 1}),
    "2 workers, cut over both": lambda step: sharded_plan(step, {"table": Partitioning(0, (2, ROWS - 2))}),
    "2 workers of 2": lambda step: plan(step, 2, 2),
}


@cache
def captured_with(name):
    """Captures the step that every test of an optimizer rewrites, and returns it with one device's results."""
    captured, step = table_step(EVERY[name]())
    return captured, one_device(captured, step, repeated_ids(3, 4))


@pytest.mark.parametrize("name, layout", pairs([name for name in EVERY if name not in SAME_UPDATES], LAYOUTS))
def test_training_equals_one_device_where_rows_repeat(name, layout):
    captured, alone = captured_with(name)
    assert_same(train(captured, LAYOUTS[layout](captured.step), repeated_ids(3, 4)), alone)


@pytest.mark.parametrize("name, layout", pairs(COSTS_ROWS, LAYOUTS))
def test_nothing_in_the_step_has_as_many_rows_as_the_table(name, layout):
    captured, _ = captured_with(name)
    items = rewritten(captured, LAYOUTS[layout](captured.step))
    assert [node for step in items for node in nodes_with_rows(step, ROWS)] == []


@pytest.mark.parametrize("name", ["adagrad", "sgd, clipped by global norm"])
def test_that_is_so_because_the_step_was_rewritten(name):
    captured, _ = captured_with(name)
    assert len(nodes_with_rows(captured.step, ROWS)) > 3


@pytest.mark.parametrize("name", ["rmsprop", "adadelta"])
def test_the_table_itself_is_updated_by_rows_where_only_the_slots_decay(name):
    captured, _ = captured_with(name)
    (step,) = rewritten(captured, plan(captured.step, 1, 2))
    divided = [node.name for node in step.graph_def.node if node.op == "RealDiv" and "divide_rows" in node.name]
    assert len(divided) == 1
    assert not [node for node in nodes_with_rows(step, ROWS) if node.split()[0] in ("Sqrt", "IsNan", "Equal", "Any")]


@pytest.mark.parametrize("name", COSTS_TABLE)
def test_it_is_said_which_variables_are_written_whole(name, caplog):
    _, slots = COSTS_TABLE[name]
    captured, _ = captured_with(name)
    log_once.cache_clear()
    with caplog.at_level("INFO", "autodist"):
        for _ in range(2):
            rewritten(captured, plan(captured.step, 1, 2))
    said = [record.getMessage() for record in caplog.records if "writes all rows" in record.getMessage()]
    assert len(said) == 1
    lines = said[0].splitlines()
    assert lines[0].startswith(f"table has {ROWS} rows")
    named = {line.strip().partition(":")[0].rpartition("/table_")[2] for line in lines[1:]}
    assert named == set(slots)


@pytest.mark.parametrize("name", COSTS_ROWS)
def test_nothing_is_said_of_updates_of_rows(name, caplog):
    captured, _ = captured_with(name)
    log_once.cache_clear()
    with caplog.at_level("INFO", "autodist"):
        rewritten(captured, plan(captured.step, 1, 2))
    assert "writes all rows" not in caplog.text


def test_it_is_said_why_what_is_added_to_a_table_is_no_sum_of_rows(caplog):
    captured, _ = captured_with("adam")
    log_once.cache_clear()
    with caplog.at_level("INFO", "autodist"):
        rewritten(captured, plan(captured.step, 2, 1))
    (said,) = [record.getMessage() for record in caplog.records if "writes all rows" in record.getMessage()]
    told = next(line for line in said.splitlines() if line.strip().startswith("table:"))
    assert re.fullmatch(
        r"  table: Assign\w+ \(\S+\) .*, since ReadVariableOp \(\S+\) may be nonzero in every row", told
    )
