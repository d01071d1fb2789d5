"""Subgroups: parts of a group that reduce among themselves before their results are reduced together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autodist.placement.group import Group


@dataclass(frozen=True)
class Subgroups:
    """Communication pattern of hierarchical sums: within each subgroup first, then between subgroups.

    The first workers of each subgroup have a *rank*; the number of ranks is the size of the smallest subgroup. Workers
    of equal rank exchange the sums of their subgroups. Workers without a rank, and workers that only receive sums, are
    distributed over the ranks, which send them the sums. A worker therefore communicates with its own subgroup and
    about one worker of each other subgroup: for √W subgroups of √W workers with 2·(√W-1) workers instead of W-1.

    Attributes:
        groups: the subgroups. The receivers of each are the workers that its members send results to.
    """

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, numbers: Sequence[int], group: Group) -> Subgroups | None:
        """Divides a group into subgroups; returns None if fewer than two have a place.

        Args:
            numbers: the number of each worker's subgroup.
            group: the group.
        """
        used = sorted({numbers[worker] for worker in group.workers}) if numbers else []
        if len(used) < 2:
            return None
        return cls(
            tuple(
                Group(
                    tuple(place for place in group.places if numbers[place.worker] == number),
                    tuple(worker for worker in group.receivers if numbers[worker] == number),
                )
                for number in used
            )
        )

    @cached_property
    def ranks(self) -> int:
        """The number of ranks in each subgroup."""
        return min(len(group.workers) for group in self.groups)

    @cached_property
    def most_called(self) -> int:
        """The largest number of other workers that one worker sends to; its step runs ops on each of them."""
        remote = [-(-len(group.everyone) // self.ranks) for group in self.groups]
        local = [len(group.everyone) - 1 for group in self.groups]
        return max(count + sum(remote) - remote[subgroup] for subgroup, count in enumerate(local))

    def subgroup_of(self, worker: int) -> int:
        """Returns the number of a worker's subgroup."""
        return self._positions[worker][0]

    def rank_of(self, worker: int) -> int | None:
        """Returns the rank of a worker in its subgroup; None if it has none."""
        position = self._positions[worker][1]
        return position if position < self.ranks else None

    def sender(self, subgroup: int, to: int) -> int:
        """Returns the worker that sends the subgroup's results to a worker of another subgroup."""
        return self.groups[subgroup].workers[self._positions[to][1] % self.ranks]

    def across(self, rank: int) -> tuple[int, ...]:
        """Returns the workers of one rank, by subgroup."""
        return tuple(group.workers[rank] for group in self.groups)

    def shares(self, worker: int, is_gathered: bool) -> dict[int, int]:
        """Maps each other worker to the share of a worker's traffic that goes to it.

        Args:
            worker: a worker with replicas.
            is_gathered: True if each worker's data is sent to all workers, like rows, and not summed in pieces.
        """
        subgroup, rank = self.subgroup_of(worker), self.rank_of(worker)
        group = self.groups[subgroup]
        traffic: Counter[int] = Counter()
        if is_gathered:
            traffic.update(group.everyone)
            remote = [w for other in self.groups if other is not group for w in other.everyone]
            traffic.update({w: len(group.workers) for w in remote if self.sender(subgroup, w) == worker})
        else:
            traffic.update(dict.fromkeys(group.workers[: self.ranks], len(self.groups)))
            if rank is not None:
                traffic.update(dict.fromkeys(group.everyone, len(self.groups)))
                traffic.update(dict.fromkeys(self.across(rank), 2))
        del traffic[worker]
        return dict(traffic)

    @cached_property
    def _positions(self) -> dict[int, tuple[int, int]]:
        """Maps each worker to its subgroup and its position there."""
        return {
            worker: (subgroup, position)
            for subgroup, group in enumerate(self.groups)
            for position, worker in enumerate(group.everyone)
        }
