"""Files of metrics as runs write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autodist.runs.metrics.records import METRICS_FILE, PLANS_FILE, MetricsLine, PlanRecord, WorkerMetrics

NAMES = ("localhost:0", "localhost:1")


def line(step: int, name: str = "train", seconds: float | None = 0.01, **more: Any) -> MetricsLine:
    """Returns a line of two workers, of whose steps one was traced."""
    by_worker = more.pop("by_worker", None) or tuple(
        WorkerMetrics(
            worker=worker, seconds=seconds, outside=0.002, compute=0.006, wait=0.003, send=0.0, traced=0.01,
            peak_memory=500_000_000, bytes_sent=1000 * step,
        )
        for worker in NAMES
    )  # fmt: skip
    values = {
        "time": 1_700_000_000.0 + step, "started": 1_700_000_000.0, "restarts": 0, "step": step, "name": name,
        "steps": 10, "seconds": seconds, "examples_per_second": 6400.0, "workers": 2, "by_worker": by_worker,
    }  # fmt: skip
    return MetricsLine(**(values | more))


def plan(name: str = "train", **more: Any) -> PlanRecord:
    values = {
        "time": 1_700_000_000.0, "started": 1_700_000_000.0, "restarts": 0, "fault": "", "step": 0, "name": name,
        "script": "train.py", "workers": NAMES, "builder": "AllReduce", "plan": "│ kernel │ AllReduce │",
    }  # fmt: skip
    return PlanRecord(**(values | more))


def write(folder: Path, lines: Sequence[MetricsLine], plans: Sequence[PlanRecord] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    for file, records in ((METRICS_FILE, lines), (PLANS_FILE, plans)):
        (folder / file).write_text("".join(record.model_dump_json() + "\n" for record in records))
    return folder
