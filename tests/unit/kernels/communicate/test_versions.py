"""Each read of an owned variable sees its version, and no write waits forever, for any order of a program."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.errors import FetchedElsewhereError
from autodist.graph.editor import GraphEditor
from autodist.graph.step import Step
from autodist.kernels.communicate.buckets import digest
from tests.unit.kernels.communicate.ordered_programs import (
    BATCH,
    Layout,
    Line,
    Program,
    make,
    programs,
    rewritten_by_each,
    strategy_of,
    unordered,
)
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train

LAYOUTS = [
    Layout((0, 0)),
    Layout((0, 1)),
    Layout((1, 0)),
    Layout((2, 1), computing=2, servers=1),
    Layout((1, 1), computing=2, servers=1),
    Layout((0, 2), computing=2, servers=1),
]
CACHED = [Layout((0, 1), proxies=True), Layout((2, 2), computing=2, servers=1, proxies=True)]

READ, WRITE, GRADIENT = (Line(kind, 0) for kind in ("read", "write", "gradient"))
MOVED_AND_BACK: Program = (GRADIENT, WRITE, GRADIENT, WRITE)
"""Sharpness-aware minimization, an extragradient step, a look ahead."""


@pytest.mark.slow
@pytest.mark.parametrize("is_chained", [False, True], ids=["by variable", "chained"])
@pytest.mark.parametrize(("length", "stride"), [(2, 2), (3, 19), (4, 130)])
def test_every_read_of_enumerated_programs_sees_its_version(length: int, stride: int, is_chained: bool):
    """Programs of two to four lines, others for each way to order; of two lines all."""
    wrong = {}
    for k, program in enumerate(programs(length)[is_chained::stride]):
        captured, _ = make(program, is_chained)
        layout = LAYOUTS[k % len(LAYOUTS)]
        if found := unordered(captured, strategy_of(captured, layout)):
            wrong["; ".join(map(str, program)), layout] = found
    assert not wrong


@settings(max_examples=8, deadline=None)
@given(program=st.sampled_from(programs(4)), is_chained=st.booleans(), layout=st.sampled_from([*LAYOUTS, *CACHED]))
def test_every_read_sees_its_version(program: Program, is_chained: bool, layout: Layout):
    captured, _ = make(program, is_chained)
    assert not unordered(captured, strategy_of(captured, layout))


@pytest.mark.parametrize("layout", [LAYOUTS[1], *LAYOUTS[3:5], *CACHED], ids=str)
def test_every_read_sees_its_version_where_weights_move_between_two_gradients(layout: Layout):
    captured, _ = make(MOVED_AND_BACK, False)
    assert not unordered(captured, strategy_of(captured, layout))


@settings(max_examples=8, deadline=None)
@given(program=st.sampled_from(programs(4)), is_chained=st.booleans(), layout=st.sampled_from([*LAYOUTS, *CACHED]))
def test_programs_equal_one_device(program: Program, is_chained: bool, layout: Layout):
    captured, step = make(program, is_chained)
    batches = [(BATCH + k,) for k in range(3)]
    assert_same(train(captured, strategy_of(captured, layout), batches), one_device(captured, step, batches))


@pytest.mark.parametrize(("length", "stride"), [(2, 1), (3, 6)])
def test_a_fetch_of_some_workers_reads_its_version_or_is_refused(length: int, stride: int):
    """Workers of a session: all run the writes, and every other one fetches the read values."""
    wrong, told = {}, Counter[bool]()
    reading = [p for p in programs(length) if READ in p or Line("read", 1) in p]
    for k, program in enumerate(reading[::stride]):
        steps = [make(program, bool(k % 2), fetches)[0] for fetches in (True, False)]
        layout = LAYOUTS[k % len(LAYOUTS)]
        strategy = strategy_of(steps[0], layout)
        try:
            items = rewritten_by_each(steps, strategy)
        except FetchedElsewhereError:
            told[True] += 1
            continue
        told[False] += 1
        if found := unordered(steps[0], strategy, items):
            wrong["; ".join(map(str, program)), layout] = found
    assert not wrong
    assert told[False] > told[True]


def test_a_worker_without_replicas_begins_its_step_before_the_next_write_where_it_may_fetch():
    captured, _ = make((GRADIENT, WRITE), False, fetches=True)
    items = rewritten_by_each([captured], strategy_of(captured, Layout((1, 1), computing=2, servers=1)))
    assert [[name for name in _sent(step) if name.startswith("read/")] for step in items] == [
        [], [], [f"read/{digest('first')}/0/read/2/1"]
    ]  # fmt: skip


def test_owners_send_the_read_values_to_a_worker_without_replicas_and_need_no_signal():
    captured, _ = make((GRADIENT, READ, WRITE), False)
    items = rewritten(captured, strategy_of(captured, Layout((1, 1), computing=2, servers=1)))
    assert not any(name.startswith("read/") for step in items for name in _sent(step))
    values = [[name[-3:] for name in _sent(step) if name.startswith("remote_reads/")] for step in items]
    assert values == [[], ["1/0", "1/2"], []]


def test_an_ordinary_step_sends_no_start_signal():
    captured, _ = make((GRADIENT, WRITE, Line("gradient", 1), Line("write", 1)), False)
    for layout in (LAYOUTS[1], *LAYOUTS[3:5]):
        for step in rewritten(captured, strategy_of(captured, layout)):
            assert not [name for name in _sent(step) if name.startswith("read/")]


def test_the_update_of_a_variable_with_a_slot_waits_for_its_own_gradient_alone(monkeypatch):
    monkeypatch.setattr("autodist.kernels.communicate.parameter_servers.PACK_BYTES", 8)
    weights = [tf.Variable(np.ones(3), name=f"w{k}") for k in range(2)]
    slots = [tf.Variable(np.zeros(3), name=f"slot{k}", trainable=False) for k in range(2)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weights[0] * weights[1])
        for weight, slot, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss

    captured = capture(step, np.ones((4, 3)))
    owner = rewritten(captured, plan(captured.step, 2, owners={"w0": 0, "w1": 0}))[0]
    editor = GraphEditor(owner.graph_def)
    writes = [node.name for node in editor if node.op in ("AssignVariableOp", "AssignSubVariableOp")]
    awaited = {write: sum("push/" in n and "Dequeue" in n for n in editor.ancestors([write])) for write in writes}
    assert len(awaited) == 4 and set(awaited.values()) == {1}


def _sent(step: Step) -> list[str]:
    """The names of the queues by which a worker sends."""
    editor = GraphEditor(step.graph_def)
    sends = [node for node in editor if node.op == "QueueEnqueueV2"]
    return [editor[node.input[0]].attr["shared_name"].s.decode() for node in sends]
