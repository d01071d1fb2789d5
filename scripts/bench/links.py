"""Steps of two workers whose connection is slow, against `MultiWorkerMirroredStrategy` over the same connection."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.comparisons import Result
from bench.jobs import Length, Way, running

ROUND_TRIPS = (0.02, 0.2)
"""Seconds."""
RATES = (10, 100, 1000)
"""Mbit/s."""
BUILDERS = ("AllReduce", "PS", "PartitionedPS", "ShardedAllReduce", "Parallax")
STEPS = 5
"""Steps of a turn, which may take seconds each."""


@dataclass(frozen=True)
class Link:
    """A connection between two workers.

    Attributes:
        model: the model that is trained over it.
        round_trip: seconds.
        rate: Mbit/s in each direction; 0: unlimited.
    """

    model: str
    round_trip: float = 0
    rate: float = 0

    def __str__(self) -> str:
        return f"{self.round_trip * 1e3:.0f} ms" if self.round_trip else f"{self.rate:.0f} Mbit/s"


def links() -> Iterator[Link]:
    """Yields all links that are measured."""
    for seconds in ROUND_TRIPS:
        yield Link("tiny", round_trip=seconds)
    for rate in RATES:
        yield Link("lstm", rate=rate)


def compare_link(link: Link, length: Length) -> list[Result]:
    """Compares the step of each builder with the peer's, in turns over the same link.

    Raises:
        JobError: one of them did not run.
    """
    length = replace(length, warmup=3, turns=2, steps=STEPS, settling=1)
    slow = {"delay": link.round_trip / 2, "rate": link.rate * 1e6 / 8}
    ways = [Way("autodist", link.model, 2, builder=builder, **slow) for builder in BUILDERS]
    with running([Way("multi-worker", link.model, 2, **slow), *ways], length) as jobs:
        for _ in range(length.turns):
            for job in jobs:
                job.turn()
        for job in jobs:
            job.finish()
    times = [statistics.median(s for turn in job.seconds for s in turn) for job in jobs]
    sent = [statistics.median(job.sent_bytes) / 2 for job in jobs]  # each byte passes the loopback twice
    return [
        _result(link, builder, ours, times[0], sent_bytes)
        for builder, ours, sent_bytes in zip(BUILDERS, times[1:], sent[1:], strict=True)
    ]


def _result(link: Link, builder: str, ours: float, peer: float, sent_bytes: float) -> Result:
    if link.round_trip:
        limit, least = "a round trip", link.round_trip
    else:
        least = sent_bytes / 2 * 8 / (link.rate * 1e6)  # each worker sends half
        limit = f"{least * 1e3:.1f} ms for {sent_bytes / 2e6:.2f} MB each way"
    return Result(
        "links", f"{link.model}, {builder}, {link}", f"{ours * 1e3:.1f} ms", f"{peer * 1e3:.1f} ms", ours / peer, 1.0,
        limit=limit, of_limit=ours / least,
    )  # fmt: skip
