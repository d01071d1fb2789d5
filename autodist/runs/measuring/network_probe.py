"""Measures the costs of transfers between the workers of a run, through TensorFlow's transport.

All is measured from sessions on the chief, whose graphs have parts on several workers. The other workers' servers have
to be up; their scripts take no part.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist.errors import ClusterError
from autodist.logs.formatting import words_of
from autodist.resources.measurements import MeasuredPair, NetworkMeasurement
from autodist.runs.measuring.link_probe import BRIEFLY, Link, TimeLimits, probing

LIMIT = 10.0
"""Seconds for all measurements of a run."""

_ALL_PAIRS = 8
"""Number of machines up to which all pairs of machines are measured."""

_MOST_LINKS = 1000
"""Number of transfers in a run; with more, building the graph would take seconds."""


def measure_network(
    target: str, machine_of: Sequence[int], limit: float = LIMIT, names: Sequence[str] = ()
) -> NetworkMeasurement:
    """Measures the costs of transfers between the workers of a run.

    Call it on the chief when the servers of all workers are up, within `Run.guard`: opening a session waits as
    long as a worker has stopped. It takes about a second on a fast network. On a slow network, transfers are smaller,
    and the pairs that remain after `limit` are left out. The first pair and the transfers of all workers at once are
    always measured.

    Args:
        target: target of the chief's server.
        machine_of: the number of each worker's machine; at least two workers.
        limit: seconds for all measurements, and for each run until an unreachable worker counts as such.
        names: names of the workers, for the error.

    Raises:
        ClusterError: two workers cannot send to each other.
    """
    workers, limits = len(machine_of), TimeLimits.of(limit)
    faults = _Faults(target, tuple(names) or tuple(f"worker {worker}" for worker in range(workers)), limits)
    pairs = pairs_of(machine_of)
    first = next((pair for pair in pairs if machine_of[pair[0]] != machine_of[pair[1]]), pairs[0])
    began = time.monotonic()
    with faults.of_pair(first), probing(target, workers, first, limits.earlier(2 / 3 * limit)) as probe:
        measured, message = {first: probe.pair(*first)}, probe.message(*first)
    one_pair = time.monotonic() - began
    senders, exchanges = gathering(workers), exchange(workers)
    with faults.of_links(exchanges), probing(target, workers, range(workers), limits.earlier(1 / 3 * limit)) as probe:
        call = probe.call()
        gathered = probe.bandwidth(senders) if workers > 2 else 0.0
        exchanged = probe.bandwidth(exchanges)
    for pair in pairs:
        if pair != first and not limits.is_over(one_pair):
            with faults.of_pair(pair):
                measured[pair] = measure_pair(target, workers, pair, replace(limits, repeated=BRIEFLY))
    return NetworkMeasurement(
        pairs=tuple(measured[pair] for pair in pairs if pair in measured),
        message=message,
        gathered=gathered,
        exchanged=exchanged,
        call=call,
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def measure_pair(target: str, workers: int, pair: Link, limits: TimeLimits) -> MeasuredPair:
    """Measures the link between two workers in both directions.

    Args:
        target: target of the chief's server.
        workers: number of workers of the run.
        pair: the two workers.
        limits: limits of time.

    Raises:
        tf.errors.OpError: one of them cannot send to the other.
    """
    with probing(target, workers, pair, limits) as probe:
        return probe.pair(*pair)


def pairs_of(machine_of: Sequence[int]) -> list[Link]:
    """Returns a pair of workers for each pair of machines, and one within each machine that has several workers.

    The pairs of the chief's machine come first. With many machines, the others are paired with their neighbours only.

    >>> pairs_of([0, 0, 1, 1, 2])
    [(0, 1), (0, 2), (0, 4), (2, 3), (2, 4)]
    """
    on = [[worker for worker, at in enumerate(machine_of) if at == machine] for machine in dict.fromkeys(machine_of)]
    near = [
        (one, other)
        for one, other in itertools.combinations_with_replacement(range(len(on)), 2)
        if one == 0 or other - one <= 1 or len(on) <= _ALL_PAIRS
    ]
    near.sort(key=lambda pair: (pair[0] > 0, pair[1] - pair[0]))
    ends = ((on[one][0], on[other][0]) if one != other else tuple(on[one][:2]) for one, other in near)
    return [(pair[0], pair[1]) for pair in ends if len(pair) == 2]


def gathering(workers: int) -> list[Link]:
    """Returns the transfers from all other workers to the chief; from some of them if there are many."""
    return [(source, 0) for source in _spread(range(1, workers), _MOST_LINKS)]


def exchange(workers: int) -> list[Link]:
    """Returns the transfers from all workers to all others; to some of them if there are many.

    >>> exchange(3)
    [(0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)]
    """
    distances = _spread(range(1, workers), max(1, _MOST_LINKS // workers))
    return [(source, (source + distance) % workers) for source in range(workers) for distance in distances]


def _spread(numbers: range, most: int) -> list[int]:
    """Returns at most `most` of the numbers, at equal distances."""
    count = min(len(numbers), most)
    return [numbers[k * len(numbers) // count] for k in range(count)]


@dataclass(frozen=True)
class _Faults:
    """Names the workers that cannot send to each other.

    Attributes:
        target: target of the chief's server.
        names: names of all workers.
        limits: limits of time.
    """

    target: str
    names: Sequence[str]
    limits: TimeLimits

    @contextlib.contextmanager
    def of_pair(self, pair: Link) -> Iterator[None]:
        """Context of measurements of one pair.

        Raises:
            ClusterError: one of them failed.
        """
        try:
            yield
        except tf.errors.OpError as error:
            one, other = (self.names[worker] for worker in pair)
            raise ClusterError(
                f"{one} and {other} cannot send to each other: {self._reason(error)}. Check that each of the two "
                "machines reaches the other one under its address in the YAML, and that a firewall between them admits "
                "connections to the ports of the workers' servers (`port`); then run again."
            ) from error

    @contextlib.contextmanager
    def of_links(self, links: Sequence[Link]) -> Iterator[None]:
        """Context of measurements of many links at once; after a failure, each of them is used alone.

        Raises:
            ClusterError: a measurement failed; names the two workers if one link alone fails.
        """
        try:
            yield
        except tf.errors.OpError as error:
            until = TimeLimits(self.limits.run, time.monotonic() + self.limits.run)
            for pair in dict.fromkeys((min(link), max(link)) for link in links):
                if not until.is_over():
                    with self.of_pair(pair), probing(self.target, len(self.names), pair, until) as probe:
                        probe.reach(*pair)
            raise ClusterError(
                f"The workers cannot send to one another all at once: {self._reason(error)}. Each two of them can, so "
                "the network or a machine may be overloaded: run again, or name a strategy instead of Auto."
            ) from error

    def _reason(self, error: tf.errors.OpError) -> str:
        if isinstance(error, tf.errors.DeadlineExceededError):
            return f"there was no answer within {self.limits.run:.3g} s"
        return words_of(error).rstrip(".")
