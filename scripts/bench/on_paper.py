"""What communication takes on machines that are not there: counts of a rewritten step, and assumed times for each.

The counts are those of the graphs that workers would run (`count_messages`) and of the plan's formula for bytes. The
times for each are assumptions, which the documentation tells beside every number that is made of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from bench.comparisons import Result
from bench.jobs import output_of

LIMIT = 3600.0
WORKERS = (2, 4, 16, 64, 256)
BUILDERS = {
    "resnet50": ("AllReduce", "ShardedAllReduce", "PS", "PSLoadBalancing"),
    "embedding": ("AllReduce", "Parallax", "PS", "PartitionedPS"),
}


RINGS = {"Horovod's ring": 1, "Horovod's rings in rings": 8}
"""What the gradients of ResNet50 are compared with: how many workers each of the inner rings has."""

_FUSED = 64 << 20
"""Bytes of a buffer that Horovod adds up at once (HOROVOD_FUSION_THRESHOLD)."""


FARTHER = 1024
"""Workers for which the gradients of ResNet50 are counted besides, added up by AllReduce and in rings."""


@dataclass(frozen=True)
class Counts:
    """What one step makes the busiest worker send or receive.

    Attributes:
        bytes: over its link, in the direction in which more goes.
        messages: tensors that it sends to other workers or takes from them.
        peers: other workers on which its step runs something.
        held: bytes of variables, slots included, between two steps, by whom holds most.
    """

    bytes: int
    messages: int
    peers: int
    held: int


@dataclass(frozen=True)
class Assumed:
    """What things are assumed to take.

    Attributes:
        gigabits: of a machine's link, in a second, in each direction.
        message: seconds of a thread for a message of gRPC, whatever it holds.
        threads: that send and receive messages side by side.
        peer: seconds for a worker on which a step runs something.
        latency: seconds from a machine to another.
    """

    gigabits: float = 25
    message: float = 0.3e-3
    threads: int = 8
    peer: float = 1.3e-3
    latency: float = 50e-6

    def seconds(self, counts: Counts) -> float:
        """Of communication, none of which overlaps with computing or with another part of itself."""
        hops = 2 * self.latency if counts.peers else 0.0
        wire = counts.bytes * 8 / (self.gigabits * 1e9)
        return hops + wire + counts.messages * self.message / self.threads + counts.peers * self.peer


@dataclass(frozen=True)
class Ring:
    """What adding up in rings makes each worker send, as Horovod does (A. Sergeev and M. Del Balso 2018).

    Of W workers in one ring, each sends a W-th of a buffer to the next one, 2 (W - 1) times. In rings of S within a
    ring, each of S first has the sum of a part over its inner ring, which an outer ring of W / S adds up, as
    hierarchical all-reduce does of machines with S devices each.

    Attributes:
        workers: how many there are.
        inner: how many each inner ring has; 1: there is one ring.
    """

    workers: int
    inner: int

    @property
    def hops(self) -> int:
        """Messages of a worker one behind the other, of one buffer."""
        inner = min(self.inner, self.workers)
        return 2 * (inner - 1) + 2 * (self.workers // inner - 1)

    def counts(self, size: int, held: int) -> Counts:
        """What is counted of one worker.

        Args:
            size: of the gradients, in bytes.
            held: by each worker.
        """
        sent = size * 2 * (self.workers - 1) // self.workers
        peers = min(self.workers - 1, 2 if min(self.inner, self.workers) in (1, self.workers) else 4)
        return Counts(sent, 2 * self.hops * self.buffers(size), peers, held)

    def seconds(self, size: int, assumed: Assumed) -> float:
        """Wire and latency alone: a message takes no thread, and a neighbour nothing of its own."""
        wire = self.counts(size, 0).bytes * 8 / (assumed.gigabits * 1e9)
        return wire + self.hops * self.buffers(size) * assumed.latency

    @staticmethod
    def buffers(size: int) -> int:
        """In how many buffers so many bytes are."""
        return math.ceil(size / _FUSED)


def compare_on_paper() -> list[Result]:
    """Communication of two models' steps by builder and number of workers, against that between two.

    Raises:
        JobError: a step was not captured or rewritten.
    """
    results = []
    for model, builders in BUILDERS.items():
        arguments = [model, *map(str, WORKERS), *(f"--builder={name}" for name in builders)]
        told = json.loads(output_of(f"{model} on paper", "bench.count_messages", *arguments, limit=LIMIT)[-1])
        if model == "resnet50":
            arguments = [model, str(FARTHER), "--builder=AllReduce"]
            farther = json.loads(output_of(f"{model} on paper", "bench.count_messages", *arguments, limit=LIMIT)[-1])
            told["AllReduce"] |= farther["AllReduce"]
        for name, by_workers in told.items():
            results += _results(model, name, {int(w): Counts(**counts) for w, counts in by_workers.items()})
        if model == "resnet50":
            results += _rings(model, Counts(**told["AllReduce"][str(WORKERS[0])]))
    return results


def _rings(model: str, of_two: Counts) -> list[Result]:
    """Horovod's rings, of the gradients that two workers send each other whole."""
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
