"""Time until the first step of a script on several workers, against the same script on one device."""

from __future__ import annotations

import json
import resource
import statistics
import time
from dataclasses import dataclass

from bench.comparisons import Result
from bench.jobs import ANSWER, output_of

WORKERS = 2
LIMIT = 600.0
FLOOR = 1.3
"""Limit relative to one device's time, from the start of the process on."""


@dataclass(frozen=True)
class Started:
    """One script, from its start to the end of its first step.

    Attributes:
        seconds: the elapsed seconds.
        processor: seconds of all processes of the run, to its end, which comes right after the step.
    """

    seconds: float
    processor: float


def compare_first_step(repeat: int) -> Result:
    """Runs both scripts alternately, so that other load on the machine affects both.

    Args:
        repeat: turns of each.

    Raises:
        JobError: one of them did not run.
    """
    turns = [(_start(0), _start(WORKERS)) for _ in range(repeat)]
    alone, ours = zip(*turns, strict=True)
    by_turn = [b.seconds / a.seconds for a, b in turns]
    times = [statistics.median(one.seconds for one in each) for each in (ours, alone)]
    processor = [statistics.median(one.processor for one in each) for each in (ours, alone)]
    note = (
        f"turns {min(by_turn):.2f} to {max(by_turn):.2f}; processor time of all processes {processor[0]:.1f} s, "
        f"{processor[1]:.1f} s"
    )
    return Result(
        "first-step", "resnet50, fit, first step", f"{times[0]:.1f} s", f"{times[1]:.1f} s", statistics.median(by_turn),
        FLOOR, note,
    )  # fmt: skip


def _start(workers: int) -> Started:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    what = f"resnet50: the first step on {workers or 'no'} workers"
    lines = output_of(what, "bench.first_fit", str(workers), limit=LIMIT, threads=None)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (ended,) = (json.loads(line.removeprefix(ANSWER)) for line in lines if line.startswith(ANSWER))
    return Started(ended - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
