"""Teams: workers that add up among themselves before what they have is added to that of other teams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Subgroups:
    """Who adds up with whom, where sums are made within each team first and then between teams.

    In each team the first members have a *seat*: as many as the smallest team has members. What teams make goes from
    seat to equal seat; members without a seat, and workers that only learn sums, are told by the seats in turn. So a
    worker has to do with its own team and about one worker of each other team: with √W teams of √W workers 2·(√W-1)
    workers, in place of W-1.

    Attributes:
        members: of each team, the workers that compute, in their order.
        learners: of each team, the workers that do not compute and are told what all see.
    """

    members: tuple[tuple[int, ...], ...]
    learners: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, teams: Sequence[int], computing: Sequence[int]) -> Subgroups | None:
        """The teams of a run; None if there are none, or only one in which anybody computes.

        Args:
            teams: the team of each worker.
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
        """In each team."""
        return min(map(len, self.members))

    @cached_property
    def most_called(self) -> int:
        """How many other workers a worker's step runs something on, at most: those that it tells something."""
        told = [-(-len(self.everyone(team)) // self.seats) for team in range(len(self.members))]
        own = [len(self.everyone(team)) - 1 for team in range(len(self.members))]
        return max(mine + sum(told) - told[team] for team, mine in enumerate(own))

    def team_of(self, worker: int) -> int:
        return self._places[worker][0]

    def everyone(self, team: int) -> tuple[int, ...]:
        """All of a team; those that compute come first, and so those that have a seat."""
        return self.members[team] + self.learners[team]

    def seat_of(self, worker: int) -> int | None:
        """The seat of a worker in its team, if it has one."""
        position = self._places[worker][1]
        return position if position < self.seats else None

    def sender(self, team: int, to: int) -> int:
        """Who of a team tells a worker of another team what all of the team know."""
        return self.members[team][self._places[to][1] % self.seats]

    def across(self, seat: int) -> tuple[int, ...]:
        """The workers that have a seat of one number, by team."""
        return tuple(members[seat] for members in self.members)

    def shares(self, worker: int, is_gathered: bool) -> dict[int, int]:
        """By other worker, in what proportion a worker sends it what it sends.

        Args:
            worker: one that computes.
            is_gathered: whether what each has goes to all, as rows do, and is not added up in pieces on its way.
        """
        team, seat = self.team_of(worker), self.seat_of(worker)
        found: Counter[int] = Counter()
        if is_gathered:
            found.update(self.everyone(team))
            told = [w for other in range(len(self.members)) if other != team for w in self.everyone(other)]
            found.update({w: len(self.members[team]) for w in told if self.sender(team, w) == worker})
        else:
            found.update(dict.fromkeys(self.members[team][: self.seats], len(self.members)))
            if seat is not None:
                found.update(dict.fromkeys(self.everyone(team), len(self.members)))
                found.update(dict.fromkeys(self.across(seat), 2))
        del found[worker]
        return dict(found)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """By worker, its team and its position there."""
        return {
            worker: (team, position)
            for team in range(len(self.members))
            for position, worker in enumerate(self.everyone(team))
        }
