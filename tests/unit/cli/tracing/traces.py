"""Synthetic traces in the format of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MS = 1000.0
"""One millisecond in microseconds, the unit of traces."""


def place(task: int) -> str:
    return f"/job:worker/replica:0/task:{task}/device:CPU:0"


def ran(
    operation: str, start: float, length: float, task: int = 0, name: str | None = None, queue: str | None = None
) -> dict[str, Any]:
    """An operation; times in milliseconds."""
    name = name or operation.lower()
    args = {"label": f"[mkl 1.0MB] {name} = {operation}(x, y)"} | ({"queue": queue} if queue else {})
    return {"ph": "X", "pid": task, "tid": 0, "ts": start * MS, "dur": length * MS, "name": name, "args": args}


def moved(tensor: str, source: int, target: int, start: float, length: float, size: str = "4.0MB") -> dict[str, Any]:
    """A tensor that goes from one worker to another."""
    label = f"[{size}] [7.2Gb/s] edge_7_{tensor} from {place(source)} to {place(target)}"
    return {
        "ph": "X", "pid": target, "tid": 1, "ts": start * MS, "dur": length * MS, "name": "RecvTensor",
        "args": {"label": label},
    }  # fmt: skip


def write(folder: Path, worker: int, *events: dict[str, Any], step: str = "step_1", **about: Any) -> Path:
    """Writes one worker's trace; its clock is the chief's unless `about` overrides it."""
    devices = [
        {"ph": "M", "name": "process_name", "pid": task, "args": {"name": place(task)}}
        for task in sorted({event["pid"] for event in events})
    ]
    told = {"machine": "here", "workers": 2, "clock_ahead": 0.0, "clock_uncertainty": 0.0} | about
    file = folder / f"{step}.worker_{worker}.json"
    file.write_text(json.dumps({"traceEvents": [*devices, *events], "otherData": told}))
    return file
