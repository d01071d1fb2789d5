"""Growth of planning, rewriting and reading data with the number of workers; no worker process is started."""

from __future__ import annotations

import json
from typing import Any

from bench.comparisons import Result
from bench.jobs import output_of
from bench.network import compare_sums_on_paper

LIMIT = 3600.0
WORKERS, VARIABLES = 1024, 10_000
CHOOSING_WORKERS, MOST_CHOOSING = 64, 10.0
"""Number of workers for which `Auto` chooses, and the limit in seconds."""
MOST_PLANNING, MOST_TABLE, MOST_BYTES = 5.0, 1.0, 1e9
REWRITTEN = {64: 1.5, 256: 2.5}
"""Number of workers → limit for one worker's time, relative to a cluster of two."""
GIVING, MOST_TIMES = {4: 1.5, 8: 2.0}, 2.0
"""Number of workers → limit for the chief's processor time, relative to two workers; and the limit for the bytes on any
link, relative to the values.
"""
SERVED, MOST_STEP = 16, 8.0
"""Number of workers, and the limit for one worker's processor time per step, in milliseconds."""
READING = {2: 1.5, 8: 1.5}
"""Number of workers → limit for the time per example of a worker, relative to one device."""


def compare_planning() -> list[Result]:
    """A plan for thousands of variables on a thousand workers, by every builder.

    Raises:
        JobError: a builder failed.
    """
    results = []
    for name, figures in _run("bench.plan_step", str(WORKERS), str(VARIABLES)).items():
        what = f"{name}, {VARIABLES} variables, {WORKERS} workers"
        note = f"{figures['shards']} shards, {figures['bytes'] / 1e6:.0f} MB so far; processor time"
        results += [
            _at_most(f"{what}: plan", figures["planning"], MOST_PLANNING, "s", note),
            _at_most(f"{what}: table", figures["table"], MOST_TABLE, "s"),
            _at_most(f"{what}: memory", figures["bytes"] / 1e9, MOST_BYTES / 1e9, "GB"),
        ]
    figures = _run("bench.plan_step", str(CHOOSING_WORKERS), str(VARIABLES), "--builder=Auto")["Auto"]
    what = f"Auto, {VARIABLES} variables, {CHOOSING_WORKERS} workers: choice"
    return [*results, _at_most(what, figures["planning"], MOST_CHOOSING, "s", "processor time")]


def compare_rewriting_growth(repeat: int) -> list[Result]:
    """Measures the rewriting of ResNet50 with Adam, for one worker of many and of two, by every builder.

    Raises:
        JobError: the step was not captured or rewritten.
    """
    clusters = [f"{workers}x1" for workers in (2, *REWRITTEN)]
    figures = _run("bench.rewrite_step", "resnet50", *clusters, f"--repeat={repeat}", "--every-builder")
    results = []
    for name, seconds in figures["builders"].items():
        base = min(seconds["2x1"])
        for workers, most in REWRITTEN.items():
            ours, queues = min(seconds[f"{workers}x1"]), figures["queues"][name][f"{workers}x1"]
            what, note = f"{name}, resnet50 for one of {workers}", f"{queues} queues; processor time"
            numbers = {"workers": workers, "seconds": round(ours, 3), "queues": queues}
            results.append(
                Result("growth", what, f"{ours:.2f} s", f"{base:.2f} s", ours / base, most, note, numbers=numbers)
            )
    return results


def compare_reading() -> list[Result]:
    """Measures the cost of reading data for each example, for one worker of many and alone, by each way to read.

    Raises:
        JobError: the reading job failed.
    """
    results = []
    for name, spent in _run("bench.read_data", "1", *map(str, READING)).items():
        for workers, most in READING.items():
            ours, alone = spent[str(workers)], spent["1"]
            note = "processor time for each example of a worker's own; the other: of one device"
            what = f"{name}: worker of {workers}"
            results.append(Result("growth", what, f"{ours:.0f} us", f"{alone:.0f} us", ours / alone, most, note))
    return results


def compare_giving() -> list[Result]:
    """Measures the chief's cost of broadcasting its values before the first step, and the load of the busiest link.

    Raises:
        JobError: the broadcasting job failed.
    """
    figures = _run("bench.push_values", "2", *map(str, GIVING))
    base, _ = figures["2"]
    results = []
    for workers, most in GIVING.items():
        seconds, times = figures[str(workers)]
        what, note = f"values for {workers} workers", "processor time of the chief's script"
        results += [
            Result("growth", what, f"{seconds:.2f} s", f"{base:.2f} s", seconds / base, most, note),
            _at_most(f"{what}: busiest link", times, MOST_TIMES, "times the values"),
        ]
    return results


def compare_steps() -> list[Result]:
    """Measures a small step's processor time for a worker of 16, with all servers in one process; and estimates
    reductions.

    Raises:
        JobError: the steps did not run.
    """
    figures = _run("bench.serve_step", str(SERVED))
    what, note = f"Dense(32), step of one of {SERVED}", f"calls {figures['called']} other workers; processor time"
    return [_at_most(what, 1000 * figures["seconds"], MOST_STEP, "ms", note), *compare_sums_on_paper()]


def _at_most(what: str, measured: float, most: float, unit: str, note: str = "") -> Result:
    return Result("growth", what, f"{measured:.2f} {unit}", f"{most:.2f} {unit}", measured / most, 1.0, note)


def _run(module: str, *arguments: str) -> Any:
    return json.loads(output_of(module, module, *arguments, limit=LIMIT)[-1])
