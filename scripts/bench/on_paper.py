"""What communication takes on machines that are not there: counts of a rewritten step, and assumed times for each.

The counts are those of the graphs that workers would run (`count_messages`) and of the plan's formula for bytes. The
times for each are assumptions, which the documentation tells beside every number that is made of them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from bench.comparisons import Result
from bench.jobs import output_of

LIMIT = 3600.0
WORKERS = (2, 4, 16, 64, 256)
BUILDERS = {
    "resnet50": ("AllReduce", "ShardedAllReduce", "PS", "PSLoadBalancing"),
    "embedding": ("AllReduce", "Parallax", "PS", "PartitionedPS"),
}


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


def compare_on_paper() -> list[Result]:
    """Communication of two models' steps by builder and number of workers, against that between two.

    Raises:
        JobError: a step was not captured or rewritten.
    """
    results = []
    for model, builders in BUILDERS.items():
        arguments = [model, *map(str, WORKERS), *(f"--builder={name}" for name in builders)]
        told = json.loads(output_of(f"{model} on paper", "bench.count_messages", *arguments, limit=LIMIT)[-1])
        for name, by_workers in told.items():
            results += _results(model, name, {int(w): Counts(**counts) for w, counts in by_workers.items()})
    return results


def _results(model: str, builder: str, counts: dict[int, Counts]) -> list[Result]:
    assumed = Assumed()
    base = assumed.seconds(counts[WORKERS[0]])
    results = []
    for workers, found in counts.items():
        took = assumed.seconds(found)
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
