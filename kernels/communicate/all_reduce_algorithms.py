"""Adding up: a bucket's vector over the workers, directly or in pieces, by all at once or within teams first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tensorflow as tf

from autodist.graph.parts import ReduceOp
from autodist.kernels.communicate.buckets import Bucket
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.subgroup_transfers import SubgroupTransfers
from autodist.kernels.sums import mean_of, together

Part = Sequence[tf.Tensor]
"""A vector and, if there is one, its weight."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class AllReduceAlgorithm:
    """How the vector of a bucket is added up.

    Attributes:
        exchange: between the workers.
        bucket: that is reduced.
        direct_bytes: up to this size a vector, or a piece, goes whole to whoever adds it: one hop, where cutting it
            into pieces takes two.
    """

    exchange: Communicator
    bucket: Bucket
    direct_bytes: int

    def by_all(self, mine: Part) -> tf.Tensor:
        """By all workers at once."""
        context = self.exchange.context
        if context.workers <= 2 or self._goes_whole(mine[0]):
            return mean_of(self.exchange.all_to_all("whole", mine), self.bucket.merge)
        lengths = self.bucket.cut(len(context.computing))
        return self._in_pieces(mine, lengths, context.computing, range(context.workers), "piece", "sum")

    def in_teams(self, team: SubgroupTransfers, mine: Part) -> tf.Tensor:
        """Within this worker's team, then between teams.

        A vector that is cut goes to the seats of the team, a piece each; a seat adds what its team has of its piece,
        adds that up with the equal seats of other teams, and tells its team. Between W workers in equal teams as many
        bytes travel as where all add up at once, and 4·(√W-1) messages a worker in place of 2·(W-1).
        """
        if self._goes_whole(mine[0]):
            return whole_in_teams(team, [self.bucket], [mine])[0]
        lengths = self.bucket.cut(team.teams.seats)
        vectors = tf.split(mine[0], lengths) if len(lengths) > 1 else [mine[0]]
        parts = team.to_seats("piece", [[vector, *mine[1:]] for vector in vectors])
        made = [self._between_seats(team, together(parts, self.bucket.merge))] if parts else None
        return tf.concat([whole for (whole,) in team.to_team("sum", made, [[vector] for vector in vectors])], 0)

    def _between_seats(self, team: SubgroupTransfers, ours: Part) -> tf.Tensor:
        seat = team.teams.seat_of(self.exchange.context.worker)
        assert seat is not None, "who has a piece has a seat"
        workers = team.teams.across(seat)
        if len(workers) <= 2 or self._goes_whole(ours[0]):
            for to in workers:
                if to != self.exchange.context.worker:
                    self.exchange.send(to, "piece_of_team", ours)
            return mean_of(self.exchange.parts("piece_of_team", ours, workers), self.bucket.merge)
        lengths = self.bucket.cut_again(ours[0].shape[0], len(workers))
        return self._in_pieces(ours, lengths, workers, workers, "piece_of_team", "sum_of_teams")

    def _goes_whole(self, vector: tf.Tensor) -> bool:
        return vector.shape[0] * vector.dtype.size <= self.direct_bytes

    def _in_pieces(
        self, mine: Part, lengths: Sequence[int], owners: Sequence[int], readers: Sequence[int], piece: str, sum_: str
    ) -> tf.Tensor:
        """Cut into a piece for each owner, who adds it up and hands the sum to all readers.

        Args:
            mine: this worker's part, if it is an owner; else what one looks like.
            lengths: of the pieces.
            owners: who have a part each, and add up a piece each.
            readers: who are told the sums.
            piece, sum_: the names under which both travel.
        """
        exchange, me = self.exchange, self.exchange.context.worker
        pieces = dict(zip(owners, tf.split(mine[0], lengths), strict=True))
        own = pieces.pop(me, None)
        if own is not None:
            for owner, value in pieces.items():
                exchange.send(owner, piece, [value, *mine[1:]])
        summed = exchange.receive_all(sum_, {owner: [value] for owner, value in pieces.items()})
        if own is not None:
            whole = mean_of(exchange.parts(piece, [own, *mine[1:]], owners), self.bucket.merge)
            for to in readers:
                if to != me:
                    exchange.send(to, sum_, [whole])
            summed[me] = [whole]
        return tf.concat([summed[owner][0] for owner in owners], 0)


def whole_in_teams(team: SubgroupTransfers, buckets: Sequence[Bucket], mine: Sequence[Part]) -> list[tf.Tensor]:
    """The vectors of several buckets, which travel together, whole, within this worker's team and then between teams.

    Args:
        team: by which they travel.
        buckets: none of which is made of what another one's sum gives.
        mine: of each bucket, this worker's part.
    """
    flat = [t for part in mine for t in part]
    ours = _merged(buckets, mine, team.within("whole", flat), together)
    teams = team.between("whole_of_team", [t for part in ours for t in part], lambda _: flat)
    return _merged(buckets, mine, teams, mean_of)


def _merged(
    buckets: Sequence[Bucket],
    like: Sequence[Part],
    came: Sequence[Sequence[tf.Tensor]],
    become: Callable[[Sequence[Part], ReduceOp], Made],
) -> list[Made]:
    """The merged parts of each bucket, of parts that came end to end with those of other buckets."""
    found, start = [], 0
    for bucket, part in zip(buckets, like, strict=True):
        found.append(become([one[start : start + len(part)] for one in came], bucket.merge))
        start += len(part)
    return found
