"""Steps of two workers whose connection is slow, against `MultiWorkerMirroredStrategy` over the same connection."""

from __future__ import annotations

import math
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.comparisons import Result
from bench.jobs import Job, Length, Way, running
from bench.relay import Relay

ROUND_TRIPS = (0.0, 0.02, 0.2)
"""Seconds; 0: the loopback alone, to which the others compare."""
RATES = (10, 100, 1000)
"""Mbit/s."""
BUILDERS = ("AllReduce", "PS", "PartitionedPS", "ShardedAllReduce", "Parallax")
OUTER = "DiLoCo of 6 steps"
"""As many steps as count in a turn, so that each turn has one outer step."""
FASTEST = 10_000
"""Mbit/s; no step is measured at this rate, at which the relay itself is the limit."""
STEPS = 6
"""Steps of a turn, which may take seconds each. The mean of a turn counts, since short and long steps may alternate: a
worker runs ahead of the other one while messages are on their way."""
SETTLING = 2
"""Steps of a turn that do not count. The second worker has sent its message for the first one before the turn begins,
so the first step is short, and the second one waits for the first message that is sent within the turn."""
LIMIT = 1800.0
"""Time limit in seconds for all builders over one link."""


@dataclass(frozen=True)
class Link:
    """A connection between two workers.

    Attributes:
        model: the model that is trained over it.
        builders: those of the strategies.
        round_trip: seconds.
        rate: Mbit/s in each direction; 0: unlimited.
    """

    model: str
    builders: Sequence[str] = BUILDERS
    round_trip: float = 0
    rate: float = 0

    def __str__(self) -> str:
        return f"{self.rate:.0f} Mbit/s" if self.rate else f"{self.round_trip * 1e3:.0f} ms"


def links() -> Iterator[Link]:
    """Yields all links that are measured; the smallest model is too small for two pipeline stages.

    GPipe waits for one round trip in a step, and 1F1B for several, but 1F1B sends in both directions at once.
    """
    for seconds in ROUND_TRIPS:
        yield Link("tiny", (*BUILDERS, OUTER), round_trip=seconds)
        yield Link("two-layers", ("Pipeline",), round_trip=seconds)
    for rate in RATES:
        yield Link("lstm", (*BUILDERS, OUTER, "PS in shards", "Pipeline 1F1B"), rate=rate)


def compare_link(link: Link, length: Length) -> list[Result]:
    """Compares the step of each builder with the peer's, in turns over the same link.

    Raises:
        JobError: one of them did not run.
    """
    length = replace(length, warmup=3, turns=2, steps=STEPS, settling=SETTLING, limit=LIMIT)
    slow: dict[str, Any] = {"delay": link.round_trip / 2, "rate": _bytes_per_second(link.rate)}
    ways = [Way("autodist", link.model, 2, builder=builder, **slow) for builder in link.builders]
    with running([Way("multi-worker", link.model, 2, **slow), *ways], length) as jobs:
        for _ in range(length.turns):
            for job in jobs:
                job.turn()
        for job in jobs:
            job.finish()
    peer, *ours = jobs
    return [_result(link, job, peer) for job in ours]


def _result(link: Link, ours: Job, peer: Job) -> Result:
    seconds, others = (statistics.median(map(statistics.mean, job.seconds)) for job in (ours, peer))
    what = f"{link.model}, {ours.way.builder}, {link}"
    found = Result("links", what, f"{seconds * 1e3:.1f} ms", f"{others * 1e3:.1f} ms", seconds / others, 1.0)
    if not (link.rate or link.round_trip):
        return found
    limit, least, of_peer = "a round trip", link.round_trip, link.round_trip
    if link.rate:
        sent = ours.relayed_bytes
        least, of_peer = (size / _bytes_per_second(link.rate) for size in (sent, peer.relayed_bytes))
        limit = f"{least * 1e3:.1f} ms for {sent / 1e6:.2f} MB in the busier direction"
    return replace(
        found, note=f"the peer: {others / of_peer:.2f} of its limit", limit=limit, of_limit=seconds / least,
        numbers={"peer_of_limit": others / of_peer},
    )  # fmt: skip


def compare_relay() -> list[Result]:
    """Compares the rate of a plain socket through the relay alone with the nominal rate."""
    return [_relay_result(rate, statistics.median(_socket_rate(rate) for _ in range(3))) for rate in (*RATES, FASTEST)]


def _relay_result(nominal: float, measured: float) -> Result:
    return Result(
        "links", f"a socket through the relay, {nominal:.0f} Mbit/s", f"{measured:.0f} Mbit/s",
        f"{nominal:.0f} Mbit/s, nominal", nominal / measured, math.inf if nominal == FASTEST else 1.1,
    )  # fmt: skip


def _socket_rate(nominal: float) -> float:
    """Returns the rate at which a socket sends data through a relay with a nominal rate, both in Mbit/s."""
    data = bytes(round(_bytes_per_second(nominal) * min(1.0, nominal / RATES[-1] + 0.2)))
    with tempfile.TemporaryDirectory(prefix="bench_") as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        relay = Relay(0, _bytes_per_second(nominal), Path(folder))
        own, other = "127.0.0.1:0", f"127.0.0.1:{listening.getsockname()[1]}"
        with closing(relay), socket.create_connection(_address(relay.through([own, other], 0)[1])) as sender:
            receiver = listening.accept()[0]
            start = time.perf_counter()
            sending = threading.Thread(target=sender.sendall, args=(data,))
            sending.start()
            left = len(data)
            while left:
                left -= len(receiver.recv(1 << 20))
            seconds = time.perf_counter() - start
            sending.join()
            receiver.close()
    return len(data) * 8 / seconds / 1e6


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _bytes_per_second(rate: float) -> float:
    """Converts from Mbit/s."""
    return rate * 1e6 / 8
