"""Communication of gradients overlaps with the backward pass: shown by a trace of one step of two real workers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autodist.cli.tracing.files import read_traces
from autodist.cli.tracing.spent import time_spent
from autodist.runtime.timeline import TRACE_VARIABLE
from tests.equivalence.deep_step import LAYERS, TRACES
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
    ended = run_to_its_end(
        [sys.executable, "-m", "tests.equivalence.deep_step", str(cluster)], ROOT, 90, is_forked=True
    )
    assert ended.problem is None, f"{ended.problem}\n{ended.output}"
    for worker in (0, 1):
        files = sorted((tmp_path / "traces").glob(f"*.worker_{worker}.json"))
        assert len(files) == TRACES
        early = [sent_early(events(file), worker) for file in files]
        print(f"worker {worker}: {early} of {LAYERS} messages were sent before the backward pass ended")
        # How many there are in one step is up to the machine's scheduler, which may keep a process waiting; what is
        # sent only after the backward pass is early in none.
        assert max(early) >= 2
    for traces in read_traces(tmp_path / "traces").values():
        assert [(trace.worker, trace.workers) for trace in traces] == [(0, 2), (1, 2)]
        assert traces[1].uncertainty is not None  # it has measured the offset to the chief
        for spent in time_spent(traces):
            assert spent.computing > 0
            assert spent.computing + spent.sending + spent.reading + spent.waited <= spent.took * (1 + 1e-9)
            assert {whom for whom, _ in spent.waiting} <= {1 - spent.trace.worker}


def sent_early(ran: list[Event], worker: int) -> int:
    """Returns the number of messages that were in the outbox before this worker's backward pass ended."""
    assert all(f"/task:{worker}/" in e.device for e in ran), "a step runs on its own worker alone"
    products = [e for e in ran if "MatMul" in e.op]
    assert len(products) == 3 * LAYERS - 1  # the first layer's inputs need no gradient
    backward_end = max(e.end for e in products)
    sent = [e.end for e in ran if "Enqueue" in e.op]
    assert len(sent) == LAYERS
    return sum(end < backward_end for end in sent)
