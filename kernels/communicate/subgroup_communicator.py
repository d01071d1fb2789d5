"""SubgroupCommunicator: the operations of a group that communicates within subgroups first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.compressors import Summed
from autodist.graph.parts import ReduceOp
from autodist.kernels.communicate.buckets import cut
from autodist.kernels.communicate.codec import Codec, joined, like_joined, split
from autodist.kernels.communicate.communicator import Communicator, Like, Part, is_direct, merge
from autodist.kernels.sums import ordered_sum, reduce_parts, reduce_to_mean
from autodist.placement.group import Group
from autodist.synchronizers import Subgroups

Tensors = list[tf.Tensor]


@dataclass(kw_only=True)
class SubgroupCommunicator(Communicator):
    """A communicator whose group exchanges tensors within subgroups, and between their reducing ranks.

    A worker communicates with about 2·√W others instead of W-1. Sums are added over each subgroup in rank order, then
    in subgroup order.

    Attributes:
        subgroups: of the group.
    """

    subgroups: Subgroups

    @property
    def owners(self) -> Sequence[int]:
        return [worker for rank in range(self.subgroups.ranks) for worker in self.subgroups.across(rank)]

    def all_gather(self, tag: str, part: Sequence[tf.Tensor], to_receivers: bool = True) -> list[Tensors]:
        count = len(part)
        ours = [t for tensors in self._within(tag, part, to_receivers) for t in tensors]
        found: dict[int, Tensors] = {}
        blocks = self._between(f"{tag}_of_team", ours, lambda group: list(part) * len(group.workers), to_receivers)
        for group, block in zip(self.subgroups.groups, blocks, strict=True):
            found |= {worker: block[k * count : (k + 1) * count] for k, worker in enumerate(group.workers)}
        return [found[worker] for worker in self.group.workers]

    def all_reduce(self, part: Part, how: ReduceOp) -> tf.Tensor:
        """Reduces a vector within this worker's subgroup, then between subgroups.

        A large vector is cut into one piece per reducing rank of the subgroup. A rank reduces its piece over the
        subgroup, all-reduces it with the equal ranks of other subgroups, and broadcasts it to its subgroup. With W
        workers in subgroups of equal size, as many bytes travel as at once, but 4·(√W-1) messages per worker instead of
        2·(W-1).
        """
        if is_direct(part[0]):
            return self.all_reduce_together([part], [how])[0]
        lengths = cut(part[0].shape[0], part[0].dtype, self.subgroups.ranks)
        vectors = tf.split(part[0], lengths) if len(lengths) > 1 else [part[0]]
        parts = self._scatter_to_ranks("piece", [[vector, *part[1:]] for vector in vectors])
        made = [self._between_ranks().all_reduce(reduce_parts(parts, how), how)] if parts else None
        return tf.concat([whole for (whole,) in self._broadcast_from_ranks("sum", made, [[v] for v in vectors])], 0)

    def all_reduce_together(self, parts: Sequence[Part], how: Sequence[ReduceOp]) -> list[tf.Tensor]:
        flat = [t for part in parts for t in part]
        ours = merge(parts, how, self._within("whole", flat), reduce_parts)
        of_subgroups = self._between("whole_of_team", [t for part in ours for t in part], lambda _: flat)
        return merge(parts, how, of_subgroups, reduce_to_mean)

    def reduce_scatter(self, vectors: Mapping[int, Like], codec: Codec, name: str = "") -> dict[int, Summed]:
        """Sums over subgroups first. Each rank of a subgroup handles the vectors whose owners have the same rank.

        A rank sums the vectors of its subgroup and sends the sums to the owners, which add them in subgroup order. The
        results return the same way, in the owner's encoding, so that all workers read the same bits.
        """
        by_rank = [
            {owner: vectors[owner] for owner in self.subgroups.across(rank) if owner in vectors}
            for rank in range(self.subgroups.ranks)
        ]
        specs = [[codec.specs(vector) for vector in by_owner.values()] for by_owner in by_rank]
        lost, parts = self._to_ranks(by_rank, codec, f"{name}piece") if self.contributes else ({}, [])
        made = None
        if parts and self._rank is not None:
            sums = dict(zip(by_rank[self._rank], map(ordered_sum, zip(*parts, strict=True)), strict=True))
            between = self._between_ranks()
            reduced = {owner: between.reduce_at(owner, ours, codec, name) for owner, ours in sums.items()}
            lost |= {owner: summed.lost for owner, (_, summed) in reduced.items()}
            made = joined([code for code, _ in reduced.values()])
        received = self._broadcast_from_ranks(f"{name}sum", made, list(map(like_joined, specs)))
        return {
            owner: Summed(codec.decode(code, vector), lost.get(owner))
            for by_owner, like, came in zip(by_rank, specs, received, strict=True)
            for (owner, vector), code in zip(by_owner.items(), split(came, like), strict=True)
        }

    def _to_ranks(
        self, by_rank: Sequence[Mapping[int, tf.Tensor]], codec: Codec, tag: str
    ) -> tuple[dict[int, tf.Tensor | None], list[Tensors]]:
        """Sends the vectors to the ranks of this subgroup that handle their owners.

        Returns:
            The encoding errors, by owner; and, on a reducing rank, each member's vectors for it.
        """
        lost: dict[int, tf.Tensor | None] = {}
        messages: list[Sequence[Like]] = []
        for rank, by_owner in enumerate(by_rank):
            if rank == self._rank or not by_owner:
                messages.append(codec.specs(_end_to_end(by_owner)) if by_owner else [])
                continue
            vector = tf.concat(list(by_owner.values()), 0)
            messages.append(codec.encode(vector))
            rest = tf.split(vector - codec.decode(messages[-1], vector), [v.shape[0] for v in by_owner.values()])
            lost |= dict(zip(by_owner, rest, strict=True))
        came = self._scatter_to_ranks(tag, messages)
        if self._rank is None or not came:
            return lost, []
        own = list(by_rank[self._rank].values())
        like, lengths = _end_to_end(by_rank[self._rank]), [vector.shape[0] for vector in own]
        return lost, [
            own if source == self.me else tf.split(codec.decode(sent, like), lengths)
            for source, sent in zip(self._subgroup.workers, came, strict=True)
        ]

    # -- within and between subgroups ------------------------------------------------------------------------------

    @property
    def _subgroup(self) -> Group:
        return self.subgroups.groups[self.subgroups.subgroup_of(self.me)]

    @property
    def _rank(self) -> int | None:
        return self.subgroups.rank_of(self.me)

    def _between_ranks(self) -> Communicator:
        """Returns the communicator of the workers of this worker's rank, in subgroup order."""
        assert self._rank is not None, "only reducing ranks have pieces"
        group = Group.of_workers(self.subgroups.across(self._rank))
        return Communicator(self.f, self.context, self.key, group, self.capacity, "_of_team", self.effects)

    def _within(self, tag: str, own: Sequence[tf.Tensor], to_receivers: bool = True) -> list[Tensors]:
        """Broadcasts each member's tensors within this worker's subgroup; returns them in rank order."""
        group = self._subgroup
        if self.me in group:
            self.broadcast(tag, own, _readers(group, to_receivers))
        return self._received(tag, dict.fromkeys(group.workers, own), own)

    def _between(
        self, tag: str, ours: Sequence[tf.Tensor], like: Callable[[Group], Sequence[Like]], to_receivers: bool = True
    ) -> list[Tensors]:
        """Broadcasts each subgroup's tensors to the other subgroups; returns them in subgroup order.

        Args:
            tag: of the messages.
            ours: the tensors that all members of this worker's subgroup have.
            like: returns the dtypes and static shapes of a subgroup's tensors.
            to_receivers: True if workers that do not compute receive them too.
        """
        mine, subgroups = self.subgroups.subgroup_of(self.me), self.subgroups
        if self._rank is not None:
            others = [group for group in subgroups.groups if group is not self._subgroup]
            readers = [to for group in others for to in _readers(group, to_receivers)]
            self.broadcast(tag, ours, [to for to in readers if subgroups.sender(mine, to) == self.me])
        like_of = {
            self.me if number == mine else subgroups.sender(number, self.me): like(group)
            for number, group in enumerate(subgroups.groups)
        }
        return self._received(tag, like_of, ours)

    def _scatter_to_ranks(self, tag: str, pieces: Sequence[Sequence[Like]]) -> list[Tensors]:
        """Sends each reducing rank of the subgroup its piece; returns all members' pieces for this rank, if it is one.

        Args:
            tag: of the messages.
            pieces: the piece of each rank; for this worker's own rank at least a spec. Nothing is sent to a rank with
                an empty piece.
        """
        members, rank = self._subgroup.workers, self._rank
        if self.me in members:
            to_others = zip(members, pieces, strict=False)
            self.scatter(tag, {to: piece for to, piece in to_others if to != self.me and piece})
        return [] if rank is None or not pieces[rank] else self.collect(tag, pieces[rank], members)

    def _broadcast_from_ranks(
        self, tag: str, made: Sequence[tf.Tensor] | None, like: Sequence[Sequence[Like]]
    ) -> list[Tensors]:
        """Broadcasts the tensors of each reducing rank within this worker's subgroup; returns them by rank.

        Args:
            tag: of the messages.
            made: this worker's tensors, if it is a reducing rank.
            like: dtypes and static shapes of each rank's tensors; empty for a rank that sends nothing.
        """
        rank, reducing = self._rank, self._subgroup.workers[: self.subgroups.ranks]
        if rank is not None and made is not None:
            self.broadcast(tag, made, self._subgroup.everyone)
        others = {source: like[k] for k, source in enumerate(reducing) if k != rank and like[k]}
        received = self.receive_each(tag, others)
        return [list(made or ()) if k == rank else received.get(source, []) for k, source in enumerate(reducing)]

    def _received(self, tag: str, like: Mapping[int, Sequence[Like]], own: Sequence[tf.Tensor]) -> list[Tensors]:
        """Receives tensors from each source of `like` (dtypes and shapes), in order; `own` are this worker's."""
        came = self.receive_each(tag, {source: specs for source, specs in like.items() if source != self.me})
        return [list(own) if source == self.me else came[source] for source in like]


def _readers(group: Group, with_receivers: bool) -> Sequence[int]:
    return group.everyone if with_receivers else group.workers


def _end_to_end(by_owner: Mapping[int, Like]) -> tf.TensorSpec:
    """Returns the spec of the concatenated vectors of several owners."""
    vectors = list(by_owner.values())
    return tf.TensorSpec([sum(vector.shape[0] for vector in vectors)], vectors[0].dtype)
