"""Estimated communication time on larger clusters: counts of a rewritten step, multiplied by assumed times.

The counts come from the graphs that workers would run (`count_messages`) and from the plan's formula for bytes. The
times are assumptions, and the documentation states them next to every number derived from them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from autodist.strategies.network_model import CALL, MESSAGE
from bench.comparisons import Result
from bench.jobs import output_of

LIMIT = 3600.0
WORKERS = (2, 4, 16, 64, 256)
BUILDERS = {
    "resnet50": ("AllReduce", "ShardedAllReduce", "PS", "PSLoadBalancing"),
    "embedding": ("AllReduce", "Parallax", "PS", "PartitionedPS"),
}


RINGS = {"Horovod's ring": 1, "Horovod's rings in rings": 8}
"""References for the gradients of ResNet50: the number of workers of each inner ring."""

_FUSED = 64 << 20
"""Bytes of a buffer that Horovod reduces at once (HOROVOD_FUSION_THRESHOLD)."""


FARTHER = 1024
"""A further number of workers for ResNet50's gradients, reduced by AllReduce and in rings."""


@dataclass(frozen=True)
class Counts:
    """The messages and bytes that one step makes the busiest worker send or receive.

    Attributes:
        bytes: over its link, in the busier direction.
        messages: tensors that it sends to other workers or receives from them.
        peers: other workers that its step exchanges tensors with.
        held: bytes of variables, slots included, kept between two steps by the worker that keeps most.
    """

    bytes: int
    messages: int
    peers: int
    held: int


@dataclass(frozen=True)
class Assumed:
    """Assumed times and rates.

    Attributes:
        gigabits: the gigabits per second of a machine's link, in each direction.
        message: seconds of a thread for a gRPC message, whatever its size.
        threads: the number of threads that send and receive messages concurrently.
        peer: seconds for each worker that a step exchanges tensors with.
        latency: seconds from one machine to another.
    """

    gigabits: float = 25
    message: float = 8 * MESSAGE
    threads: int = 8
    peer: float = CALL
    latency: float = 50e-6

    def seconds(self, counts: Counts) -> float:
        """Returns the seconds of communication, without overlap with computation or with other communication."""
        hops = 2 * self.latency if counts.peers else 0.0
        wire = counts.bytes * 8 / (self.gigabits * 1e9)
        return hops + wire + counts.messages * self.message / self.threads + counts.peers * self.peer


@dataclass(frozen=True)
class Ring:
    """Ring all-reduce, as in Horovod (A. Sergeev and M. Del Balso 2018).

    In one ring of W workers, each sends a W-th of a buffer to the next one, 2 (W - 1) times. In hierarchical rings,
    each of S workers first reduces one part over its inner ring. An outer ring of W / S then reduces that part.
    Hierarchical all-reduce does the same for machines with S devices each.

    Attributes:
        workers: number of workers.
        inner: number of workers in each inner ring; 1: there is one ring.
    """

    workers: int
    inner: int

    @property
    def hops(self) -> int:
        """Returns the number of sequential messages of a worker for one buffer."""
        inner = min(self.inner, self.workers)
        return 2 * (inner - 1) + 2 * (self.workers // inner - 1)

    def counts(self, size: int, held: int) -> Counts:
        """Returns the counts of one worker.

        Args:
            size: bytes of the gradients.
            held: bytes of variables on each worker.
        """
        sent = size * 2 * (self.workers - 1) // self.workers
        peers = min(self.workers - 1, 2 if min(self.inner, self.workers) in (1, self.workers) else 4)
        return Counts(sent, 2 * self.hops * self.buffers(size), peers, held)

    def seconds(self, size: int, assumed: Assumed) -> float:
        """Returns the seconds by bandwidth and latency alone, without the costs of threads and of neighbours."""
        wire = self.counts(size, 0).bytes * 8 / (assumed.gigabits * 1e9)
        return wire + self.hops * self.buffers(size) * assumed.latency

    @staticmethod
    def buffers(size: int) -> int:
        """Returns the number of buffers for `size` bytes."""
        return math.ceil(size / _FUSED)


def compare_on_paper() -> list[Result]:
    """Compares the communication of two models' steps by builder and number of workers with that of two workers.

    Raises:
        JobError: a step was not captured or rewritten.
    """
    results = []
    for model, builders in BUILDERS.items():
        arguments = [model, *map(str, WORKERS), *(f"--builder={name}" for name in builders)]
        figures = json.loads(output_of(f"{model} on paper", "bench.count_messages", *arguments, limit=LIMIT)[-1])
        if model == "resnet50":
            arguments = [model, str(FARTHER), "--builder=AllReduce"]
            farther = json.loads(output_of(f"{model} on paper", "bench.count_messages", *arguments, limit=LIMIT)[-1])
            figures["AllReduce"] |= farther["AllReduce"]
        for name, by_workers in figures.items():
            results += _results(model, name, {int(w): Counts(**counts) for w, counts in by_workers.items()})
        if model == "resnet50":
            results += _rings(model, Counts(**figures["AllReduce"][str(WORKERS[0])]))
    return results


def _rings(model: str, of_two: Counts) -> list[Result]:
    """Returns the results of Horovod's rings, for the gradients that two workers exchange whole."""
    assumed, results = Assumed(), []
    for name, inner in RINGS.items():
        rings = {workers: Ring(workers, inner) for workers in (*WORKERS, FARTHER)}
        counts = {workers: ring.counts(of_two.bytes, of_two.held) for workers, ring in rings.items()}
        seconds = {workers: ring.seconds(of_two.bytes, assumed) for workers, ring in rings.items()}
        results += _as_results(model, name, counts, seconds)
    return results


def _results(model: str, builder: str, counts: dict[int, Counts]) -> list[Result]:
    assumed = Assumed()
    return _as_results(model, builder, counts, {workers: assumed.seconds(found) for workers, found in counts.items()})


def _as_results(model: str, builder: str, counts: dict[int, Counts], seconds: dict[int, float]) -> list[Result]:
    base = seconds[WORKERS[0]]
    results = []
    for workers, found in counts.items():
        took = seconds[workers]
        note = f"{found.bytes / 1e6:.1f} MB, {found.messages} messages, {found.peers} peers of the busiest worker"
        numbers = {"workers": workers, **dataclasses.asdict(found)}
        what = f"{builder}, {model} on {workers} workers"
        results.append(
            Result(
                "paper", what, f"{took * 1e3:.1f} ms", f"{base * 1e3:.1f} ms", took / base, float(workers), note,
                numbers=numbers | {"milliseconds": round(took * 1e3, 3)},
            )
        )  # fmt: skip
    return results
