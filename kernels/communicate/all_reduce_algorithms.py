"""All-reduce of a bucket's vector: directly or in pieces, over the whole group at once or over subgroups first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tensorflow as tf

from autodist.graph.parts import ReduceOp
from autodist.kernels.communicate.buckets import Bucket
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.subgroup_transfers import SubgroupTransfers
from autodist.kernels.sums import reduce_parts, reduce_to_mean

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

    def at_once(self, part: Part) -> tf.Tensor:
        """Reduces over the whole group at once."""
        group = self.bucket.group
        if len(group.everyone) <= 2 or self._is_direct(part[0]):
            return reduce_to_mean(self.exchange.all_gather("whole", part), self.bucket.merge)
        lengths = self.bucket.cut(len(group.workers))
        return self._in_pieces(part, lengths, group.workers, sorted(group.everyone), "piece", "sum")

    def in_subgroups(self, transfers: SubgroupTransfers, part: Part) -> tf.Tensor:
        """Reduces within this worker's subgroup, then between subgroups.

        A large vector is cut into one piece per reducing rank of the subgroup. A rank sums its piece over the subgroup,
        all-reduces it with the equal ranks of other subgroups, and broadcasts it to its subgroup. With W workers in
        subgroups of equal size, as many bytes travel as in `at_once`, but 4·(√W-1) messages per worker instead of
        2·(W-1).
        """
        if self._is_direct(part[0]):
            return all_reduce_fused(transfers, [self.bucket], [part])[0]
        lengths = self.bucket.cut(transfers.subgroups.ranks)
        vectors = tf.split(part[0], lengths) if len(lengths) > 1 else [part[0]]
        parts = transfers.scatter_to_ranks("piece", [[vector, *part[1:]] for vector in vectors])
        made = [self._between_ranks(transfers, reduce_parts(parts, self.bucket.merge))] if parts else None
        return tf.concat(
            [whole for (whole,) in transfers.broadcast_in_subgroup("sum", made, [[vector] for vector in vectors])], 0
        )

    def _between_ranks(self, transfers: SubgroupTransfers, ours: Part) -> tf.Tensor:
        assert transfers.my_rank is not None, "only reducing ranks have pieces"
        workers = transfers.subgroups.across(transfers.my_rank)
        if len(workers) <= 2 or self._is_direct(ours[0]):
            self.exchange.broadcast("piece_of_team", ours, workers)
            return reduce_to_mean(self.exchange.collect("piece_of_team", ours, workers), self.bucket.merge)
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
            piece, sum_: the tags of the pieces and of the sums.
        """
        exchange, me = self.exchange, self.exchange.me
        pieces = dict(zip(owners, tf.split(part[0], lengths), strict=True))
        own_piece = pieces.pop(me, None)
        if own_piece is not None:
            exchange.scatter(piece, {owner: [value, *part[1:]] for owner, value in pieces.items()})
        summed = exchange.receive_each(sum_, {owner: [value] for owner, value in pieces.items()})
        if own_piece is not None:
            reduced = reduce_to_mean(exchange.collect(piece, [own_piece, *part[1:]], owners), self.bucket.merge)
            exchange.broadcast(sum_, [reduced], readers)
            summed[me] = [reduced]
        return tf.concat([summed[owner][0] for owner in owners], 0)


def all_reduce_fused(transfers: SubgroupTransfers, buckets: Sequence[Bucket], mine: Sequence[Part]) -> list[tf.Tensor]:
    """Reduces several buckets in the same messages, uncut, within this worker's subgroup and then between subgroups.

    Args:
        transfers: those of the subgroups.
        buckets: buckets that do not depend on each other's sums.
        mine: this worker's part of each bucket.
    """
    flat = [t for part in mine for t in part]
    ours = _merge(buckets, mine, transfers.within("whole", flat), reduce_parts)
    of_subgroups = transfers.between("whole_of_team", [t for part in ours for t in part], lambda _: flat)
    return _merge(buckets, mine, of_subgroups, reduce_to_mean)


def _merge(
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
