"""Gradients travel while the backward pass goes on: shown by a trace of one step of two real workers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autodist.runtime.timeline import TRACE_VARIABLE
from tests.equivalence.deep_step import LAYERS
from tests.equivalence.harness import ROOT, run_to_its_end

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@dataclass(frozen=True)
class Event:
    device: str
    name: str
    op: str
    start: float
    end: float


def events(file: Path) -> list[Event]:
    told = json.loads(file.read_text())["traceEvents"]
    devices = {e["pid"]: e["args"]["name"] for e in told if e["ph"] == "M"}
    found = []
    for e in told:
        if e["ph"] == "X":
            op = re.search(r" = (\w+)\(", e["args"]["label"])
            found.append(Event(devices[e["pid"]], e["name"], op[1] if op else "", e["ts"], e["ts"] + e["dur"]))
    return found


def test_overlap_of_communication_and_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "traces"))
    cluster = tmp_path / "cluster.yml"
    strategy = {"builder": "AllReduce", "all_reduce_spec": "SHUFFLE", "chunk_size": 1}  # a bucket a layer
    node = {"address": "localhost", "cpus": [0, 1], "workers": 2}
    cluster.write_text(json.dumps({"nodes": [node], "strategy": strategy}))
    ended = run_to_its_end([sys.executable, "-m", "tests.equivalence.deep_step", str(cluster)], ROOT, 90)
    assert ended.problem is None, f"{ended.problem}\n{ended.output}"
    for worker in (0, 1):
        (file,) = (tmp_path / "traces").glob(f"*.worker_{worker}.json")
        ran = events(file)
        here, there = f"/task:{worker}/", f"/task:{1 - worker}/"
        products = [e for e in ran if here in e.device and "MatMul" in e.op]
        assert len(products) == 3 * LAYERS - 1  # the first layer's inputs need no gradient
        backward_end = max(e.end for e in products)
        arrived = sorted(e.start for e in ran if there in e.device and "Enqueue" in e.op)
        assert len(arrived) == 2 * LAYERS  # a piece to the other worker, and the sum of this one's piece
        early = sum(start < backward_end for start in arrived)
        print(f"worker {worker}: {early} of {len(arrived)} sent before the backward pass ended")
        assert early >= 2, f"the backward pass ended at {backward_end}, gradients arrived at {arrived}"
