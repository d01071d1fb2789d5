"""Group: the places that take part in a reduction or an exchange, in rank order."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autodist.proto import strategy_pb2


class Place(NamedTuple):
    """A device of a worker, which computes one replica or holds one slice."""

    worker: int
    device: str = "cpu:0"


@dataclass(frozen=True)
class Group:
    """An ordered tuple of places; the position of a place is its rank.

    Sums, rings and concatenations follow the order of the ranks. A worker with several places first reduces over these,
    so only workers exchange tensors.

    Attributes:
        places: the places, in rank order.
        receivers: workers without a place that receive results too, such as parameter servers.
        is_all: True for a group of everyone in the run. Its messages have no group in their keys.
    """

    places: tuple[Place, ...]
    receivers: tuple[int, ...] = ()
    is_all: bool = False

    @classmethod
    def of_run(cls, config: strategy_pb2.GraphConfig) -> Group:
        """Returns the group of all replicas of a run; workers without replicas are receivers."""
        places = tuple(Place(replica.worker, replica.device) for replica in config.replicas)
        computing = {place.worker for place in places}
        return cls(places, tuple(w for w in range(worker_count(config)) if w not in computing), is_all=True)

    @classmethod
    @functools.cache
    def all_workers(cls, count: int) -> Group:
        """Returns the group of all workers of a run, with or without replicas."""
        return cls(tuple(map(Place, range(count))), is_all=True)

    @classmethod
    def of_workers(cls, workers: Iterable[int], receivers: Iterable[int] = ()) -> Group:
        """Returns a group with one place for each worker."""
        return cls(tuple(map(Place, workers)), tuple(receivers))

    def __contains__(self, worker: int) -> bool:
        """Returns True if a worker has a place."""
        return worker in self._ranks

    def __hash__(self) -> int:
        return self._hash

    @property
    def size(self) -> int:
        """The number of places."""
        return len(self.places)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The workers that have a place, in the order of their first ranks."""
        return tuple(self._ranks)

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        """The workers that have a place, then the receivers."""
        return self.workers + self.receivers

    @property
    def spans_workers(self) -> bool:
        """True if several workers take part, so that tensors are exchanged."""
        return len(self.everyone) > 1

    def ranks(self, worker: int) -> tuple[int, ...]:
        """Returns the ranks of a worker's places."""
        return self._ranks.get(worker, ())

    @cached_property
    def key(self) -> str:
        """The part of a message key that distinguishes the groups of a run; empty for everyone."""
        return "" if self.is_all else ",".join(f"{place.worker}/{place.device}" for place in self.places)

    @cached_property
    def _ranks(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for rank, place in enumerate(self.places):
            found[place.worker] = (*found.get(place.worker, ()), rank)
        return found

    @cached_property
    def _hash(self) -> int:
        return hash((self.places, self.receivers, self.is_all))


def worker_count(config: strategy_pb2.GraphConfig) -> int:
    """Returns the number of workers of a run, including those without replicas."""
    return config.workers or 1 + max((replica.worker for replica in config.replicas), default=0)
