"""SubgroupTransfers: what goes from worker to worker where teams add up first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.packed import like_packed, packed, unpacked
from autodist.synchronizers import Subgroups

Tensors = list[tf.Tensor]


@dataclass(frozen=True)
class SubgroupTransfers:
    """Sends and receives within a team and between teams, in an order that is the same on all workers.

    Attributes:
        exchange: by which all of it goes.
        teams: of the run.
    """

    exchange: Communicator
    teams: Subgroups

    @property
    def me(self) -> int:
        return self.exchange.context.worker

    @property
    def my_team(self) -> int:
        return self.teams.team_of(self.me)

    def within(self, what: str, mine: Sequence[tf.Tensor], to_learners: bool = True) -> list[Tensors]:
        """What each member of this worker's team sends to all of the team, in their order."""
        members, everyone = self.teams.members[self.my_team], self.teams.everyone(self.my_team)
        if self.me in members:
            together = packed(mine)
            for to in everyone if to_learners else members:
                if to != self.me:
                    self.exchange.send(to, what, together)
        return self._received(what, dict.fromkeys(members, mine), mine)

    def between(
        self, what: str, ours: Sequence[tf.Tensor], like: Callable[[int], Sequence[tf.Tensor | tf.TensorSpec]],
        to_learners: bool = True,
    ) -> list[Tensors]:  # fmt: skip
        """What each team has, in their order.

        Args:
            what: travels.
            ours: that all of this worker's team have.
            like: dtypes and static shapes of what a team has, by its number.
            to_learners: whether those that do not compute are told.
        """
        teams, numbers = self.teams, range(len(self.teams.members))
        if teams.seat_of(self.me) is not None:
            together = packed(ours)
            for team in numbers:
                for to in teams.everyone(team) if to_learners else teams.members[team]:
                    if team != self.my_team and teams.sender(self.my_team, to) == self.me:
                        self.exchange.send(to, what, together)
        sources = {team: self.me if team == self.my_team else teams.sender(team, self.me) for team in numbers}
        return self._received(what, {source: like(team) for team, source in sources.items()}, ours)

    def gather(self, what: str, mine: Sequence[tf.Tensor], to_learners: bool = True) -> list[Tensors]:
        """What every worker that computes sends to all, in the order of the workers."""
        count, members = len(mine), self.teams.members
        ours = [t for part in self.within(what, mine, to_learners) for t in part]
        found: dict[int, Tensors] = {}
        blocks = self.between(f"{what}_of_team", ours, lambda team: list(mine) * len(members[team]), to_learners)
        for team, block in zip(members, blocks, strict=True):
            found |= {worker: block[k * count : (k + 1) * count] for k, worker in enumerate(team)}
        return [found[worker] for worker in sorted(found)]

    def to_seats(self, what: str, pieces: Sequence[Sequence[tf.Tensor | tf.TensorSpec]]) -> list[Tensors]:
        """Sends to each seat of the team its piece; returns, where this worker has a seat, all members' pieces for it.

        Args:
            what: travels.
            pieces: for each seat; of this worker's own seat at least what it looks like. Nothing travels for a seat for
                which there is nothing.
        """
        members, seat = self.teams.members[self.my_team], self.teams.seat_of(self.me)
        if self.me in members:
            for to, piece in zip(members, pieces, strict=False):
                if to != self.me and piece:
                    self.exchange.send(to, what, piece)
        return [] if seat is None or not pieces[seat] else self.exchange.parts(what, pieces[seat], members)

    def to_team(
        self, what: str, made: Sequence[tf.Tensor] | None, like: Sequence[Sequence[tf.Tensor | tf.TensorSpec]]
    ) -> list[Tensors]:
        """What each seat of this worker's team has made, which it tells all of the team.

        Args:
            what: travels.
            made: by this worker, if it has a seat.
            like: dtypes and static shapes of what each seat makes; nothing for a seat that makes nothing.
        """
        seat, seated = self.teams.seat_of(self.me), self.teams.members[self.my_team][: self.teams.seats]
        if seat is not None and made is not None:
            for to in self.teams.everyone(self.my_team):
                if to != self.me:
                    self.exchange.send(to, what, made)
        others = {source: like[k] for k, source in enumerate(seated) if k != seat and like[k]}
        received = self.exchange.receive_all(what, others)
        return [list(made or ()) if k == seat else received.get(source, []) for k, source in enumerate(seated)]

    def _received(
        self, what: str, like: Mapping[int, Sequence[tf.Tensor | tf.TensorSpec]], mine: Sequence[tf.Tensor]
    ) -> list[Tensors]:
        """What each source of `like`, which has types and shapes, sends, in its order; `mine` in this one's place."""
        others = {source: like_packed(specs) for source, specs in like.items() if source != self.me}
        came = self.exchange.receive_all(what, others)
        return [list(mine) if s == self.me else unpacked(came[s], specs) for s, specs in like.items()]
