"""Measures the links between machines.

The measurement is a small run of its own (`measure_links`), which starts and ends like any run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import pydantic

from autodist.cli.checking.check_machines import CheckedMachine
from autodist.resources import ResourceSpec
from autodist.waits import Event

ENVIRONMENT: Mapping[str, str] = {"TF_CPP_MIN_LOG_LEVEL": "3"}
"""Environment of the measuring processes."""

_END_LIMIT, _SLACK = 3.0, 60.0

_MAX_ERROR = 2000


class MeasureOrder(pydantic.BaseModel):
    """The order to measure links.

    Attributes:
        spec: the machines, from `ResourceSpec.to_payload`.
        pairs: names of the workers at both ends of each link.
        seconds: time after which no further pair is measured.
    """

    spec: str
    pairs: tuple[tuple[str, str], ...]
    seconds: float


class MeasuredLink(pydantic.BaseModel):
    """The link between two workers.

    Attributes:
        one: name of the first worker.
        other: name of the second worker.
        round_trip: seconds for one byte forth and back through TensorFlow's transport; None if there is a `problem`.
        there: bytes per second from `one` to `other`.
        back: bytes per second from `other` to `one`.
        problem: the reason that the link could not be measured; usually empty.
    """

    one: str = ""
    other: str = ""
    round_trip: float | None = None
    there: float | None = None
    back: float | None = None
    problem: str = ""

    def named(self, one: str, other: str) -> MeasuredLink:
        return self.model_copy(update={"one": one, "other": other})


@dataclass(frozen=True)
class Measured:
    """The measured links, and the pairs left out.

    Attributes:
        links: the measurements.
        left_out: messages about pairs that were not measured, with the reason.
    """

    links: tuple[MeasuredLink, ...] = ()
    left_out: tuple[str, ...] = ()


def pairs_of(workers: Sequence[str]) -> list[tuple[str, str]]:
    """Returns each pair once: first the chief's, then neighbours, then pairs that are further apart.

    >>> pairs_of(["a", "b", "c", "d"])
    [('a', 'b'), ('a', 'c'), ('a', 'd'), ('b', 'c'), ('c', 'd'), ('b', 'd')]
    """
    numbered = itertools.combinations(range(len(workers)), 2)
    return [(workers[i], workers[j]) for i, j in sorted(numbered, key=lambda pair: (pair[0] > 0, pair[1] - pair[0]))]


def measure(spec: ResourceSpec, usable: Sequence[CheckedMachine], seconds: float) -> Measured:
    """Measures the links between machines, one pair at a time; for a single machine, between two of its workers.

    Args:
        spec: all machines.
        usable: the machines without a fault, the chief's first.
        seconds: time after which no further pair is measured.
    """
    small = _one_worker_each(spec, usable)
    pairs = pairs_of([worker.name for worker in small.workers])
    if not pairs:
        return Measured()
    order = MeasureOrder(spec=small.to_payload(), pairs=tuple(pairs), seconds=seconds)
    links, problem = _run(order, small.start_timeout + small.reach_timeout + seconds + _SLACK)
    left = [pair for pair in pairs if pair not in [(link.one, link.other) for link in links]]
    return Measured(tuple(links), tuple(_why_left_out(left, pairs, seconds, problem)))


def _one_worker_each(spec: ResourceSpec, usable: Sequence[CheckedMachine]) -> ResourceSpec:
    """Returns a spec with one worker on each machine, or two on a single machine that has several."""
    workers = 2 if len(usable) == 1 and usable[0].node.workers > 1 else 1
    changed = {"workers": workers, "cpus": list(range(workers)), "gpus": []}
    content = spec.to_dict()
    content.pop("strategy", None)
    content["nodes"] = [one.node.model_dump(mode="json") | changed for one in usable]
    return ResourceSpec.from_dict(content)


def _why_left_out(
    left: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str]], seconds: float, problem: str | None
) -> Iterator[str]:
    if not left:
        return
    which = ", ".join(f"{one} and {other}" for one, other in left[:5]) + (" and others" if len(left) > 5 else "")
    reason = problem or f"{seconds:g} s were over; `--seconds` sets the limit"
    yield f"{len(left)} of {len(pairs)} pairs were not measured ({which}): {reason}"


def _run(order: MeasureOrder, limit: float) -> tuple[list[MeasuredLink], str | None]:
    """Returns the measurements, and the reason for an early end or None."""
    command = [sys.executable, "-P", "-m", "autodist.cli.checking.measure_links"]
    links = []
    with tempfile.TemporaryFile() as errors, _started(command, errors) as process:
        assert process.stdin and process.stdout, "both are pipes"
        is_late = Event()

        def stop() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(order.model_dump_json().encode())
            for line in process.stdout:
                with contextlib.suppress(pydantic.ValidationError):  # output of a worker
                    links.append(MeasuredLink.model_validate_json(line))
            status = process.wait()
        finally:
            timer.cancel()
        errors.seek(0)
        complaints = errors.read().decode(errors="replace").strip()[-_MAX_ERROR:]
    if is_late.is_set():
        return links, f"the measurement did not end within {limit:g} s"
    return links, None if status == 0 else complaints or f"the measurement ended with status {status}"


@contextlib.contextmanager
def _started(command: Sequence[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command, and kills it at the end if it still runs; Ctrl-C reaches it too, and its workers end with it."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=os.environ | ENVIRONMENT)
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT)
        process.kill()
        process.wait()
