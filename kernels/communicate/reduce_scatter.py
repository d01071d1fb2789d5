"""ReduceScatter: an owner sums each vector, in the encoding of a compressor, over all workers or within teams first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from autodist.compressors import Code, Summed
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.packed import like_packed, packed, unpacked
from autodist.kernels.communicate.subgroup_transfers import SubgroupTransfers
from autodist.kernels.sums import ordered_sum

Like: TypeAlias = "tf.Tensor | tf.TensorSpec"
Coded: TypeAlias = "list[tf.Tensor]"
"""What a code makes of one vector."""


@dataclass(frozen=True)
class ReduceScatter:
    """Sums of vectors that each have an owner, who adds them up in the order of the workers and tells all.

    Whoever sends something knows what the code took from it, and all take for a sum what the owner's code says, the
    owner too. A worker's own part is added as it is.

    Attributes:
        exchange: between the workers.
        code: what vectors travel as.
        then: what the owner makes of a sum before it is told.
        name: tells the sums apart that are made of one bucket.
    """

    exchange: Communicator
    code: Code
    then: Callable[[tf.Tensor], tf.Tensor]
    name: str

    @property
    def me(self) -> int:
        return self.exchange.context.worker

    def by_all(self, vectors: Mapping[int, Like]) -> dict[int, Summed]:
        """Each worker sends each owner what it has, and the owner tells each: two hops.

        Args:
            vectors: by owner, what this worker has; what it looks like, where it computes nothing.
        """
        return {owner: self._at_owner(owner, vector) for owner, vector in vectors.items()}

    def in_teams(self, team: SubgroupTransfers, vectors: Mapping[int, Like]) -> dict[int, Summed]:
        """Each worker sends the seats of its team what is for owners that have equal seats in their teams.

        A seat adds up what its team has and sends that on to the owners, who add up the teams' sums in the order of the
        teams. Sums go back the same way, passed on in their owner's code, so that all read the same.

        Args:
            team: by which they travel.
            vectors: as in `by_all`; the owners have seats.
        """
        seated = [
            {owner: vectors[owner] for owner in team.teams.across(seat) if owner in vectors}
            for seat in range(team.teams.seats)
        ]
        lost, parts = self._to_seats(team, seated) if self.exchange.context.computes else ({}, [])
        bundles = [Bundle([self._specs(vector) for vector in by_owner.values()]) for by_owner in seated]
        made, seat = None, team.teams.seat_of(self.me)
        if seat is not None and parts:
            codes, rest = self._between_seats(team.teams.across(seat), list(seated[seat]), parts)
            lost, made = lost | rest, bundles[seat].together(codes)
        told = team.to_team(self._sum, made, [bundle.like for bundle in bundles])
        return {
            owner: Summed(self.code.decode(code, vector.dtype), lost.get(owner))
            for by_owner, bundle, came in zip(seated, bundles, told, strict=True)
            for (owner, vector), code in zip(by_owner.items(), bundle.apart(came), strict=True)
        }

    @property
    def _piece(self) -> str:
        return f"{self.name}piece"

    @property
    def _sum(self) -> str:
        return f"{self.name}sum"

    def _at_owner(self, owner: int, mine: Like) -> Summed:
        """What all have of one vector."""
        context, specs = self.exchange.context, self._specs(mine)
        if owner != self.me:
            sent = self.code.encode(mine) if context.computes else None
            if sent is not None:
                self.exchange.send(owner, self._piece, sent)
            told = self.code.decode(self.exchange.receive(owner, self._sum, specs), mine.dtype)
            return Summed(told, None if sent is None else mine - self.code.decode(sent, mine.dtype))
        came = [
            mine if source == owner else self.code.decode(self.exchange.receive(source, self._piece, specs), mine.dtype)
            for source in context.computing
        ]
        whole = self.then(ordered_sum(came))
        sent = self.code.encode(whole)
        for to in range(context.workers):
            if to != owner:
                self.exchange.send(to, self._sum, sent)
        told = self.code.decode(sent, mine.dtype)
        return Summed(told, whole - told)

    def _to_seats(
        self, team: SubgroupTransfers, seated: Sequence[Mapping[int, tf.Tensor]]
    ) -> tuple[dict[int, tf.Tensor], list[list[tf.Tensor]]]:
        """Sends each seat of the team what is for its owners.

        Returns:
            What the code took, by owner; and, where this worker has a seat, the vectors for it of each member.
        """
        mine = team.teams.seat_of(self.me)
        lost: dict[int, tf.Tensor] = {}
        messages: list[Sequence[Like]] = []
        for seat, by_owner in enumerate(seated):
            if seat == mine or not by_owner:
                messages.append(like_packed(self._specs(_end_to_end(by_owner))) if by_owner else [])
                continue
            vector = tf.concat(list(by_owner.values()), 0)
            sent = self.code.encode(vector)
            messages.append(packed(sent))
            rest = tf.split(vector - self.code.decode(sent, vector.dtype), [v.shape[0] for v in by_owner.values()])
            lost |= dict(zip(by_owner, rest, strict=True))
        came = team.to_seats(self._piece, messages)
        if mine is None or not came:
            return lost, []
        own = list(seated[mine].values())
        like, lengths = _end_to_end(seated[mine]), [vector.shape[0] for vector in own]
        specs = self._specs(like)
        return lost, [
            own if source == self.me else tf.split(self.code.decode(unpacked(sent, specs), like.dtype), lengths)
            for source, sent in zip(team.teams.members[team.my_team], came, strict=True)
        ]

    def _between_seats(
        self, across: Sequence[int], owners: Sequence[int], parts: Sequence[Sequence[tf.Tensor]]
    ) -> tuple[list[Coded], dict[int, tf.Tensor]]:
        """Adds up what the team has and then, of its own vector, what the teams have.

        Args:
            across: the workers of equal seats, by team.
            owners: those of them for whom there is a vector.
            parts: of each member of the team, the vectors for these owners.

        Returns:
            What each owner tells, in its code; and what the code took from what this worker sent, by owner.
        """
        ours = {owner: ordered_sum(vectors) for owner, vectors in zip(owners, zip(*parts, strict=True), strict=True)}
        lost: dict[int, tf.Tensor] = {}
        for owner, vector in ours.items():
            if owner != self.me:
                sent = self.code.encode(vector)
                self.exchange.send(owner, f"{self._piece}_of_team", packed(sent))
                lost[owner] = vector - self.code.decode(sent, vector.dtype)
        codes: dict[int, Coded] = {}
        for owner, vector in ours.items():
            specs = self._specs(vector)
            if owner != self.me:
                came = self.exchange.receive(owner, f"{self._sum}_of_teams", like_packed(specs))
                codes[owner] = unpacked(came, specs)
                continue
            teams = self.exchange.parts(f"{self._piece}_of_team", like_packed(specs), across)
            whole = self.then(
                ordered_sum(
                    [
                        vector if source == self.me else self.code.decode(unpacked(sent, specs), vector.dtype)
                        for source, sent in zip(across, teams, strict=True)
                    ]
                )
            )
            codes[owner] = self.code.encode(whole)
            lost[owner] = whole - self.code.decode(codes[owner], vector.dtype)
            for to in across:
                if to != self.me:
                    self.exchange.send(to, f"{self._sum}_of_teams", packed(codes[owner]))
        return [codes[owner] for owner in owners], lost

    def _specs(self, vector: Like) -> list[tf.TensorSpec]:
        """What the code makes of such a vector."""
        return self.code.specs(vector.shape[0], vector.dtype)


@dataclass(frozen=True)
class Bundle:
    """Codes of several vectors in one message, of as many tensors as the code of one.

    Attributes:
        specs: of each code.
    """

    specs: Sequence[Sequence[tf.TensorSpec]]

    @property
    def like(self) -> list[Like]:
        """What the message looks like; nothing, if there are no vectors."""
        return like_packed(self._joined)

    def together(self, codes: Sequence[Coded]) -> list[tf.Tensor]:
        return packed([tf.concat([tf.reshape(t, [-1]) for t in alike], 0) for alike in zip(*codes, strict=True)])

    def apart(self, message: Sequence[tf.Tensor]) -> list[Coded]:
        if not self.specs:
            return []
        columns = [
            [tf.reshape(piece, s.shape) for piece, s in zip(tf.split(whole, _sizes(alike)), alike, strict=True)]
            for whole, alike in zip(unpacked(message, self._joined), zip(*self.specs, strict=True), strict=True)
        ]
        return [list(code) for code in zip(*columns, strict=True)]

    @property
    def _joined(self) -> list[tf.TensorSpec]:
        columns = zip(*self.specs, strict=True)
        return [tf.TensorSpec([sum(_sizes(alike))], alike[0].dtype) for alike in columns]


def _sizes(alike: Sequence[tf.TensorSpec]) -> list[int]:
    return [int(spec.shape.num_elements()) for spec in alike]


def _end_to_end(by_owner: Mapping[int, Like]) -> tf.TensorSpec:
    """The spec of the vectors for several owners, one behind the other."""
    vectors = list(by_owner.values())
    return tf.TensorSpec([sum(vector.shape[0] for vector in vectors)], vectors[0].dtype)


class AsItIs:
    """The code that changes nothing."""

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        return [vector]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        return sent[0]

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([length], dtype)]
