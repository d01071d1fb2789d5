"""Traces: one run of a step, in the file format of Chrome's viewer."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import TraceError
from autodist.graph.step import CapturedStep
from autodist.runtime import timeline
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.program import Program
from autodist.runtime.timeline import TRACE_VARIABLE, TRACED_RUN
from autodist.runtime.updates import Updates


@pytest.fixture
def graph_runners():
    made = GraphRunners("", tf.compat.v1.ConfigProto())
    yield made
    made.close(60)


def program(graph_runners):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [4, 4], name="x")
        tf.identity(x @ x + 1.0, name="y")
    step = CapturedStep(graph.as_graph_def(), inputs={"x:0": None}, outputs=("y:0",))
    return Program(graph_runners, step, ["x:0"], Updates(lambda failure: failure))


def run(step, times):
    return [step.run([np.eye(4, dtype="float32")], 1)[0].tolist() for _ in range(times)]


def test_nothing_is_written_unless_asked_for(graph_runners, monkeypatch, tmp_path):
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    run(program(graph_runners), TRACED_RUN + 1)
    assert not list(tmp_path.iterdir())


def test_the_tenth_run_of_each_step_is_written(graph_runners, monkeypatch, tmp_path):
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "traces"))
    first, second = program(graph_runners), program(graph_runners)
    plain = run(first, TRACED_RUN - 1)
    assert not tmp_path.joinpath("traces").exists()
    traced, after = run(first, 1), run(first, 1)
    assert traced == after == plain[:1]
    run(second, TRACED_RUN)
    files = sorted(tmp_path.joinpath("traces").iterdir())
    assert [f.name for f in files] == ["step_1.worker_0.json", "step_2.worker_0.json"]


def test_it_is_told_at_the_end_that_no_step_ran_as_often(graph_runners, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(timeline, "_counts", {})
    ends = []
    monkeypatch.setattr(timeline.atexit, "register", ends.append)
    short, longer = program(graph_runners), program(graph_runners)
    run(short, 1)
    run(longer, TRACED_RUN - 1)
    (at_the_end,) = ends
    at_the_end()
    assert "nothing was traced" in caplog.text and "(step_2.worker_0.json: 9 times)" in caplog.text
    caplog.clear()
    run(longer, 1)
    at_the_end()
    assert not caplog.records


@pytest.mark.parametrize("within", ["taken", "taken/below", "/proc/traces"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(graph_runners, monkeypatch, tmp_path, within):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / within))
    monkeypatch.setattr(os, "access", lambda place, mode: not str(place).startswith("/proc"))  # root may everything
    with pytest.raises(TraceError, match="no trace can be written there, since .*(taken is no folder|/proc may not)"):
        program(graph_runners)


def test_a_trace_tells_what_ran_where_and_when(graph_runners, monkeypatch, tmp_path):
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    run(program(graph_runners), TRACED_RUN)
    events = json.loads((tmp_path / "step_1.worker_0.json").read_text())["traceEvents"]
    devices = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert len(devices) == len(set(devices)) and any("CPU:0" in name for name in devices)
    ran = [e for e in events if e["ph"] == "X"]
    (product,) = [e for e in ran if "MatMul(" in e["args"]["label"]]
    assert product["name"].startswith("step_1/") and product["dur"] > 0
    for one in ran:
        beside = [e for e in ran if (e["pid"], e["tid"]) == (one["pid"], one["tid"]) and e is not one]
        assert all(e["ts"] >= one["ts"] + one["dur"] or e["ts"] + e["dur"] <= one["ts"] for e in beside)
