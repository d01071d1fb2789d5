"""All-reduce of a bucket's vector: directly or in pieces, over all workers at once or over subgroups first."""

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
"""A vector and its weight, if it has one."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class AllReduceAlgorithm:
    """All-reduce algorithms for the vector of one bucket.

    Attributes:
        exchange: the communicator between workers.
        bucket: the bucket to reduce.
        direct_bytes: vectors and pieces up to this size are sent to every worker that sums them. This takes one hop;
            cutting a vector into pieces takes two.
    """

    exchange: Communicator
    bucket: Bucket
    direct_bytes: int

    def by_all(self, part: Part) -> tf.Tensor:
        """Reduces over all workers at once."""
        context = self.exchange.context
        if context.workers <= 2 or self._is_direct(part[0]):
            return mean_of(self.exchange.all_to_all("whole", part), self.bucket.merge)
        lengths = self.bucket.cut(len(context.computing))
        return self._in_pieces(part, lengths, context.computing, range(context.workers), "piece", "sum")

    def in_teams(self, team: SubgroupTransfers, part: Part) -> tf.Tensor:
        """Reduces within this worker's subgroup, then between subgroups.

        A large vector is cut into one piece per reducing rank of the subgroup. A rank sums its piece over the subgroup,
        all-reduces it with the equal ranks of other subgroups, and broadcasts it to its subgroup. With W workers in
        subgroups of equal size, as many bytes travel as in `by_all`, but 4·(√W-1) messages per worker instead of
        2·(W-1).
        """
        if self._is_direct(part[0]):
            return all_reduce_fused(team, [self.bucket], [part])[0]
        lengths = self.bucket.cut(team.teams.seats)
        vectors = tf.split(part[0], lengths) if len(lengths) > 1 else [part[0]]
        parts = team.scatter_to_ranks("piece", [[vector, *part[1:]] for vector in vectors])
        made = [self._between_seats(team, together(parts, self.bucket.merge))] if parts else None
        return tf.concat(
            [whole for (whole,) in team.broadcast_in_subgroup("sum", made, [[vector] for vector in vectors])], 0
        )

    def _between_seats(self, team: SubgroupTransfers, ours: Part) -> tf.Tensor:
        rank = team.teams.seat_of(self.exchange.context.worker)
        assert rank is not None, "only reducing ranks have pieces"
        workers = team.teams.across(rank)
        if len(workers) <= 2 or self._is_direct(ours[0]):
            for to in workers:
                if to != self.exchange.context.worker:
                    self.exchange.send(to, "piece_of_team", ours)
            return mean_of(self.exchange.parts("piece_of_team", ours, workers), self.bucket.merge)
        lengths = self.bucket.cut_again(ours[0].shape[0], len(workers))
        return self._in_pieces(ours, lengths, workers, workers, "piece_of_team", "sum_of_teams")

    def _is_direct(self, vector: tf.Tensor) -> bool:
        return vector.shape[0] * vector.dtype.size <= self.direct_bytes

    def _in_pieces(
        self, part: Part, lengths: Sequence[int], owners: Sequence[int], readers: Sequence[int], piece: str, sum_: str
    ) -> tf.Tensor:
        """Reduces a vector in pieces: each owner sums one piece and sends the sum to all readers.

        Args:
            part: this worker's part if it is an owner, otherwise tensors of the same dtypes and shapes.
            lengths: lengths of the pieces.
            owners: the workers that contribute one part each and sum one piece each.
            readers: the workers that receive the sums.
            piece, sum_: the message names of the pieces and of the sums.
        """
        exchange, me = self.exchange, self.exchange.context.worker
        pieces = dict(zip(owners, tf.split(part[0], lengths), strict=True))
        own_piece = pieces.pop(me, None)
        if own_piece is not None:
            for owner, value in pieces.items():
                exchange.send(owner, piece, [value, *part[1:]])
        summed = exchange.receive_all(sum_, {owner: [value] for owner, value in pieces.items()})
        if own_piece is not None:
            reduced = mean_of(exchange.parts(piece, [own_piece, *part[1:]], owners), self.bucket.merge)
            for to in readers:
                if to != me:
                    exchange.send(to, sum_, [reduced])
            summed[me] = [reduced]
        return tf.concat([summed[owner][0] for owner in owners], 0)


def all_reduce_fused(team: SubgroupTransfers, buckets: Sequence[Bucket], mine: Sequence[Part]) -> list[tf.Tensor]:
    """Reduces several buckets in the same messages, uncut, within this worker's subgroup and then between subgroups.

    Args:
        team: the transfers of the subgroups.
        buckets: buckets that do not depend on each other's sums.
        mine: this worker's part of each bucket.
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
    """Merges the parts of each bucket; each element of `came` holds one worker's parts of all buckets, concatenated."""
    found, start = [], 0
    for bucket, part in zip(buckets, like, strict=True):
        found.append(become([one[start : start + len(part)] for one in came], bucket.merge))
        start += len(part)
    return found
