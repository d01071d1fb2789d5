"""The cost of `encrypt: ssh`: time and processor time of a step, against the same without encryption.

On both sides, each worker but the first is started over SSH, by an SSH server on a loopback address. At a limited rate,
a relay limits the connections between the workers: those of SSH, or those of TensorFlow's servers. Of three workers,
the second and the third send to one another through the first one's machine if SSH carries their traffic.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.comparisons import Result
from bench.jobs import Job, Length, Way, environment, running
from bench.relay import Relay
from tests.cluster.hosts import LoopbackHosts

MODELS = ("lstm", "mlp-sgd")
RATES = (1000, 0)
"""Mbit/s; 0: unlimited."""
FLOORS = {
    ("lstm", 1000, 2): (1.05, 1.15),
    ("lstm", 0, 2): (1.05, 1.10),
    ("lstm", 0, 3): (1.60, 1.15),
    ("mlp-sgd", 1000, 2): (1.40, 1.45),
    ("mlp-sgd", 0, 2): (1.85, 1.45),
    ("mlp-sgd", 0, 3): (2.40, 1.75),
}
"""The ratios of the time and of the processor time, by model, rate and workers, measured on a busy machine."""
LIMIT = 600.0
"""Time limit in seconds for the two sides."""
_TICK = os.sysconf("SC_CLK_TCK")
_CHIEF = "127.0.0.100"


@dataclass(frozen=True)
class Encryption:
    """A comparison of the steps of one model over one connection.

    Attributes:
        model: the model.
        rate: Mbit/s in each direction; 0: unlimited.
        workers: number of workers, each on its own machine.
    """

    model: str
    rate: float
    workers: int = 2

    def __str__(self) -> str:
        rate = f"{self.rate:.0f} Mbit/s" if self.rate else "unlimited"
        return f"{self.model}, {self.workers} workers, {rate}"


@dataclass
class _Side:
    """One side of a comparison: its job, its SSH servers, and the processor seconds of a step in each turn."""

    job: Job
    servers: list[int]
    seconds: list[float]

    def turn(self) -> None:
        before = self._used()
        self.job.turn()
        self.seconds.append((self._used() - before) / self.job.steps_of_turn)

    def _used(self) -> float:
        return sum(map(_processor_seconds, (self.job.leader, *self.servers)))


def encryptions() -> Iterator[Encryption]:
    """Yields all comparisons."""
    for model in MODELS:
        for rate in RATES:
            yield Encryption(model, rate)
        yield Encryption(model, 0, workers=3)


def compare_encryption(case: Encryption, length: Length) -> list[Result]:
    """Compares the two sides in turns; returns a line for the time and one for the processor time.

    Raises:
        JobError: one of them did not run.
    """
    length = replace(length, warmup=3, limit=LIMIT)
    rate = _bytes_per_second(case.rate)
    with _machines(case.workers, 0, False) as plain, _machines(case.workers, rate, True) as encrypted:
        sides_of = {plain: rate, encrypted: 0.0}
        ways = [Way("autodist", case.model, case.workers, rate=r, cluster=str(one.file)) for one, r in sides_of.items()]
        with running(ways, length) as jobs:
            sides = [_Side(job, [*one.servers], []) for job, one in zip(jobs, sides_of, strict=True)]
            for _ in range(length.turns):
                for side in sides:
                    side.turn()
            for job in jobs:
                job.finish()
    times = [statistics.median(map(statistics.mean, side.job.seconds)) for side in sides]
    used = [statistics.median(side.seconds) for side in sides]
    measured = {"a step": times, "processor time": used}
    floors = FLOORS[case.model, case.rate, case.workers]
    return [
        _result(f"{case}: {name}, encrypted", seconds, floor)
        for (name, seconds), floor in zip(measured.items(), floors, strict=True)
    ]


def _result(what: str, seconds: Sequence[float], floor: float) -> Result:
    """Returns the line for the seconds of the plain side and of the encrypted one."""
    plain, encrypted = seconds
    return Result("encryption", what, f"{encrypted * 1e3:.1f} ms", f"{plain * 1e3:.1f} ms", encrypted / plain, floor)


@dataclass(frozen=True)
class _Machines:
    """Machines for one side: their YAML, and the processes of their SSH servers."""

    file: Path
    servers: tuple[int, ...]


@contextmanager
def _machines(workers: int, rate: float, encrypts: bool) -> Iterator[_Machines]:
    """Yields machines for a number of workers.

    Args:
        workers: number of workers, each on a machine of its own.
        rate: bytes per second of each connection to an SSH server, in each direction; 0: unlimited.
        encrypts: True if SSH carries the traffic between the workers.
    """
    with contextlib.ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="bench_")))
        hosts = at_end.enter_context(LoopbackHosts(folder, workers - 1, environment(1)))
        nodes: list[dict[str, Any]] = [{"address": _CHIEF, "chief": True}]
        groups = {}
        for host in hosts.hosts:
            address, port = host.address, host.port
            if rate:
                relay = at_end.enter_context(closing(Relay(0, rate, folder)))
                address, _, through = relay.through(["", f"{address}:{port}"], 0)[1].partition(":")
                port = int(through)
            nodes.append({"address": address, "ssh_config": host.group})
            groups[host.group] = {**hosts.ssh[host.group], "port": port, "host_key_checking": False}
        keys = {"encrypt": "ssh"} if encrypts else {}
        cluster = folder / "cluster.json"
        cluster.write_text(json.dumps({"nodes": nodes, "ssh": groups, **keys}))
        yield _Machines(cluster, tuple(map(hosts.server_of, hosts.hosts)))


def _processor_seconds(process: int) -> float:
    """Returns the processor time that a process and its descendants, except relays of the bench, have used so far."""
    with contextlib.suppress(OSError):  # it has ended
        if b"bench/relay.py" in Path(f"/proc/{process}/cmdline").read_bytes():
            return 0.0
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for file in Path(f"/proc/{process}/task").glob("*/children")
            for child in file.read_text().split()
        ]
        return (int(fields[11]) + int(fields[12])) / _TICK + sum(map(_processor_seconds, children))
    return 0.0


def _bytes_per_second(rate: float) -> float:
    """Converts from Mbit/s."""
    return rate * 1e6 / 8
