"""Subgroups: workers that sum among themselves before their sum is added to those of other subgroups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Subgroups:
    """Communication pattern of hierarchical sums: within each subgroup first, then between subgroups.

    The first members of each subgroup have a *rank*; the number of ranks is the size of the smallest subgroup. Subgroup
    sums are exchanged between equal ranks. Members without a rank, and workers that only receive sums, are served by
    the ranks in turn. A worker therefore communicates with its own subgroup and about one worker of each other
    subgroup: for √W subgroups of √W workers with 2·(√W-1) workers instead of W-1.

    Attributes:
        members: for each subgroup, the workers that compute, in order.
        learners: for each subgroup, the workers that do not compute and only receive results.
    """

    members: tuple[tuple[int, ...], ...]
    learners: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, teams: Sequence[int], computing: Sequence[int]) -> Subgroups | None:
        """Returns the subgroups of a run; None if there are none, or only one has workers that compute.

        Args:
            teams: the subgroup of each worker.
            computing: the workers that have replicas.
        """
        numbers = sorted({teams[worker] for worker in computing}) if teams else []
        if len(numbers) < 2:
            return None
        members: dict[int, list[int]] = {number: [] for number in numbers}
        learners: dict[int, list[int]] = {number: [] for number in numbers}
        computes = frozenset(computing)
        for worker, number in enumerate(teams):
            (members if worker in computes else learners)[number].append(worker)
        return cls(tuple(map(tuple, members.values())), tuple(map(tuple, learners.values())))

    @property
    def seats(self) -> int:
        """The number of ranks in each subgroup."""
        return min(map(len, self.members))

    @cached_property
    def most_called(self) -> int:
        """The largest number of other workers that a worker's step runs ops on: those that it sends to."""
        remote = [-(-len(self.everyone(team)) // self.seats) for team in range(len(self.members))]
        local = [len(self.everyone(team)) - 1 for team in range(len(self.members))]
        return max(count + sum(remote) - remote[team] for team, count in enumerate(local))

    def team_of(self, worker: int) -> int:
        return self._places[worker][0]

    def everyone(self, team: int) -> tuple[int, ...]:
        """Returns all workers of a subgroup; those that compute, and so those with a rank, come first."""
        return self.members[team] + self.learners[team]

    def seat_of(self, worker: int) -> int | None:
        """Returns the rank of a worker in its subgroup; None if it has none."""
        position = self._places[worker][1]
        return position if position < self.seats else None

    def sender(self, team: int, to: int) -> int:
        """Returns the member that sends the subgroup's results to a worker of another subgroup."""
        return self.members[team][self._places[to][1] % self.seats]

    def across(self, seat: int) -> tuple[int, ...]:
        """Returns the workers of one rank, by subgroup."""
        return tuple(members[seat] for members in self.members)

    def shares(self, worker: int, is_gathered: bool) -> dict[int, int]:
        """Maps each other worker to the share of a worker's traffic that goes to it.

        Args:
            worker: one that computes.
            is_gathered: True if each worker's data goes to all, like rows, and is not summed in pieces on its way.
        """
        team, seat = self.team_of(worker), self.seat_of(worker)
        traffic: Counter[int] = Counter()
        if is_gathered:
            traffic.update(self.everyone(team))
            remote = [w for other in range(len(self.members)) if other != team for w in self.everyone(other)]
            traffic.update({w: len(self.members[team]) for w in remote if self.sender(team, w) == worker})
        else:
            traffic.update(dict.fromkeys(self.members[team][: self.seats], len(self.members)))
            if seat is not None:
                traffic.update(dict.fromkeys(self.everyone(team), len(self.members)))
                traffic.update(dict.fromkeys(self.across(seat), 2))
        del traffic[worker]
        return dict(traffic)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Maps each worker to its subgroup and its position there."""
        return {
            worker: (team, position)
            for team in range(len(self.members))
            for position, worker in enumerate(self.everyone(team))
        }
