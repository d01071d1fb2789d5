"""SubgroupTransfers: transfers between workers for reductions over subgroups."""

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
    """Sends and receives within a subgroup and between subgroups, in an order that is the same on all workers.

    In the messages, `what` is a name; `to_non_computing` is True if workers without replicas receive them too.

    Attributes:
        exchange: the communicator that sends everything.
        teams: the subgroups of the run.
    """

    exchange: Communicator
    teams: Subgroups

    @property
    def me(self) -> int:
        return self.exchange.context.worker

    @property
    def my_team(self) -> int:
        return self.teams.team_of(self.me)

    def within(self, what: str, local: Sequence[tf.Tensor], to_non_computing: bool = True) -> list[Tensors]:
        """Broadcasts each member's tensors within this worker's subgroup; returns them in member order."""
        members, everyone = self.teams.members[self.my_team], self.teams.everyone(self.my_team)
        if self.me in members:
            together = packed(local)
            for to in everyone if to_non_computing else members:
                if to != self.me:
                    self.exchange.send(to, what, together)
        return self._received(what, dict.fromkeys(members, local), local)

    def between(
        self, what: str, ours: Sequence[tf.Tensor], like: Callable[[int], Sequence[tf.Tensor | tf.TensorSpec]],
        to_non_computing: bool = True,
    ) -> list[Tensors]:  # fmt: skip
        """Broadcasts each subgroup's tensors to the other subgroups; returns them in subgroup order.

        Args:
            what: name of the message.
            ours: the tensors that all members of this worker's subgroup have.
            like: maps a subgroup's number to the dtypes and static shapes of its tensors.
            to_learners: True if workers that do not compute receive them too.
        """
        teams, numbers = self.teams, range(len(self.teams.members))
        if teams.seat_of(self.me) is not None:
            together = packed(ours)
            for team in numbers:
                for to in teams.everyone(team) if to_non_computing else teams.members[team]:
                    if team != self.my_team and teams.sender(self.my_team, to) == self.me:
                        self.exchange.send(to, what, together)
        sources = {team: self.me if team == self.my_team else teams.sender(team, self.me) for team in numbers}
        return self._received(what, {source: like(team) for team, source in sources.items()}, ours)

    def gather(self, what: str, local: Sequence[tf.Tensor], to_non_computing: bool = True) -> list[Tensors]:
        """Broadcasts every computing worker's tensors to all workers; returns them in worker order."""
        count, members = len(local), self.teams.members
        ours = [t for part in self.within(what, local, to_non_computing) for t in part]
        found: dict[int, Tensors] = {}
        blocks = self.between(f"{what}_of_team", ours, lambda team: list(local) * len(members[team]), to_non_computing)
        for team, block in zip(members, blocks, strict=True):
            found |= {worker: block[k * count : (k + 1) * count] for k, worker in enumerate(team)}
        return [found[worker] for worker in sorted(found)]

    def scatter_to_ranks(self, what: str, pieces: Sequence[Sequence[tf.Tensor | tf.TensorSpec]]) -> list[Tensors]:
        """Sends each reducing rank of the subgroup its piece; returns all members' pieces for this rank, if it is one.

        Args:
            what: name of the message.
            pieces: the piece of each rank; for this worker's own rank at least a spec. Nothing is sent to a rank with
                an empty piece.
        """
        members, seat = self.teams.members[self.my_team], self.teams.seat_of(self.me)
        if self.me in members:
            for to, piece in zip(members, pieces, strict=False):
                if to != self.me and piece:
                    self.exchange.send(to, what, piece)
        return [] if seat is None or not pieces[seat] else self.exchange.parts(what, pieces[seat], members)

    def broadcast_in_subgroup(
        self, what: str, made: Sequence[tf.Tensor] | None, like: Sequence[Sequence[tf.Tensor | tf.TensorSpec]]
    ) -> list[Tensors]:
        """Broadcasts the tensors of each reducing rank within this worker's subgroup; returns them by rank.

        Args:
            what: name of the message.
            made: this worker's tensors, if it is a reducing rank.
            like: dtypes and static shapes of each rank's tensors; empty for a rank that sends nothing.
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
        """Receives tensors from each source of `like` (dtypes and shapes), in order; `mine` is this worker's own."""
        others = {source: like_packed(specs) for source, specs in like.items() if source != self.me}
        came = self.exchange.receive_all(what, others)
        return [list(mine) if s == self.me else unpacked(came[s], specs) for s, specs in like.items()]
