"""Traces: one run of a step, in a file that Chrome's viewer reads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.item import GraphItem
from autodist.runtime.hosts import Hosts
from autodist.runtime.program import Program
from autodist.runtime.timeline import TRACE_VARIABLE, TRACED_RUN
from autodist.runtime.updates import Updates


@pytest.fixture
def host():
    made = Hosts("", tf.compat.v1.ConfigProto())
    yield made
    made.close()


def program(host):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [4, 4], name="x")
        tf.identity(x @ x + 1.0, name="y")
    item = GraphItem(graph.as_graph_def(), inputs={"x:0": None}, outputs=("y:0",))
    return Program(host, item, ["x:0"], Updates(lambda failure: failure))


def run(step, times):
    return [step.run([np.eye(4, dtype="float32")], 1)[0].tolist() for _ in range(times)]


def test_nothing_is_written_unless_asked_for(host, monkeypatch, tmp_path):
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    run(program(host), TRACED_RUN + 1)
    assert not list(tmp_path.iterdir())


def test_the_tenth_run_of_each_step_is_written(host, monkeypatch, tmp_path):
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "traces"))
    first, second = program(host), program(host)
    plain = run(first, TRACED_RUN - 1)
    assert not tmp_path.joinpath("traces").exists()
    traced, after = run(first, 1), run(first, 1)
    assert traced == after == plain[:1]
    run(second, TRACED_RUN)
    files = sorted(tmp_path.joinpath("traces").iterdir())
    assert [f.name for f in files] == ["step_1.worker_0.json", "step_2.worker_0.json"]


def test_a_trace_tells_what_ran_where_and_when(host, monkeypatch, tmp_path):
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    run(program(host), TRACED_RUN)
    events = json.loads((tmp_path / "step_1.worker_0.json").read_text())["traceEvents"]
    devices = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert len(devices) == len(set(devices)) and any("CPU:0" in name for name in devices)
    ran = [e for e in events if e["ph"] == "X"]
    (product,) = [e for e in ran if "MatMul(" in e["args"]["label"]]
    assert product["name"].startswith("step_1/") and product["dur"] > 0
    for one in ran:
        beside = [e for e in ran if (e["pid"], e["tid"]) == (one["pid"], one["tid"]) and e is not one]
        assert all(e["ts"] >= one["ts"] + one["dur"] or e["ts"] + e["dur"] <= one["ts"] for e in beside)
