"""SubgroupTransfers: transfers between workers for reductions over subgroups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.packed import like_packed, packed, unpacked
from autodist.placement.group import Group
from autodist.synchronizers import Subgroups

Tensors = list[tf.Tensor]


@dataclass(frozen=True)
class SubgroupTransfers:
    """Sends and receives within a subgroup and between subgroups, in an order that is the same on all workers.

    If `to_receivers` is True, workers without replicas receive a message too.

    Attributes:
        exchange: the communicator that sends everything.
        subgroups: the subgroups of its group.
    """

    exchange: Communicator
    subgroups: Subgroups

    @property
    def me(self) -> int:
        return self.exchange.me

    @property
    def my_subgroup(self) -> int:
        return self.subgroups.subgroup_of(self.me)

    @property
    def my_group(self) -> Group:
        return self.subgroups.groups[self.my_subgroup]

    @property
    def my_rank(self) -> int | None:
        return self.subgroups.rank_of(self.me)

    def within(self, tag: str, local: Sequence[tf.Tensor], to_receivers: bool = True) -> list[Tensors]:
        """Broadcasts each member's tensors within this worker's subgroup; returns them in rank order."""
        if self.me in self.my_group:
            self.exchange.broadcast(tag, packed(local), _readers(self.my_group, to_receivers))
        return self._received(tag, dict.fromkeys(self.my_group.workers, local), local)

    def between(
        self, tag: str, ours: Sequence[tf.Tensor], like: Callable[[Group], Sequence[tf.Tensor | tf.TensorSpec]],
        to_receivers: bool = True,
    ) -> list[Tensors]:  # fmt: skip
        """Broadcasts each subgroup's tensors to the other subgroups; returns them in subgroup order.

        Args:
            tag: of the messages.
            ours: the tensors that all members of this worker's subgroup have.
            like: returns the dtypes and static shapes of a subgroup's tensors.
            to_receivers: True if workers that do not compute receive them too.
        """
        mine, subgroups = self.my_subgroup, self.subgroups
        if self.my_rank is not None:
            others = [group for group in subgroups.groups if group is not self.my_group]
            readers = [to for group in others for to in _readers(group, to_receivers)]
            self.exchange.broadcast(tag, packed(ours), [to for to in readers if subgroups.sender(mine, to) == self.me])
        like_of = {
            self.me if number == mine else subgroups.sender(number, self.me): like(group)
            for number, group in enumerate(subgroups.groups)
        }
        return self._received(tag, like_of, ours)

    def all_gather(self, tag: str, local: Sequence[tf.Tensor], to_receivers: bool = True) -> list[Tensors]:
        """Broadcasts every member's tensors to everyone in the group; returns them in the group's rank order."""
        count = len(local)
        ours = [t for part in self.within(tag, local, to_receivers) for t in part]
        found: dict[int, Tensors] = {}
        blocks = self.between(f"{tag}_of_team", ours, lambda group: list(local) * len(group.workers), to_receivers)
        for group, block in zip(self.subgroups.groups, blocks, strict=True):
            found |= {worker: block[k * count : (k + 1) * count] for k, worker in enumerate(group.workers)}
        return [found[worker] for worker in self.exchange.group.workers]

    def scatter_to_ranks(self, tag: str, pieces: Sequence[Sequence[tf.Tensor | tf.TensorSpec]]) -> list[Tensors]:
        """Sends each reducing rank of the subgroup its piece; returns all members' pieces for this rank, if it is one.

        Args:
            tag: of the messages.
            pieces: the piece of each rank; for this worker's own rank at least a spec. Nothing is sent to a rank with
                an empty piece.
        """
        members, rank = self.my_group.workers, self.my_rank
        if self.me in members:
            to_others = zip(members, pieces, strict=False)
            self.exchange.scatter(tag, {to: piece for to, piece in to_others if to != self.me and piece})
        return [] if rank is None or not pieces[rank] else self.exchange.collect(tag, pieces[rank], members)

    def broadcast_in_subgroup(
        self, tag: str, made: Sequence[tf.Tensor] | None, like: Sequence[Sequence[tf.Tensor | tf.TensorSpec]]
    ) -> list[Tensors]:
        """Broadcasts the tensors of each reducing rank within this worker's subgroup; returns them by rank.

        Args:
            tag: of the messages.
            made: this worker's tensors, if it is a reducing rank.
            like: dtypes and static shapes of each rank's tensors; empty for a rank that sends nothing.
        """
        rank, reducing = self.my_rank, self.my_group.workers[: self.subgroups.ranks]
        if rank is not None and made is not None:
            self.exchange.broadcast(tag, made, self.my_group.everyone)
        others = {source: like[k] for k, source in enumerate(reducing) if k != rank and like[k]}
        received = self.exchange.receive_each(tag, others)
        return [list(made or ()) if k == rank else received.get(source, []) for k, source in enumerate(reducing)]

    def _received(
        self, tag: str, like: Mapping[int, Sequence[tf.Tensor | tf.TensorSpec]], own: Sequence[tf.Tensor]
    ) -> list[Tensors]:
        """Receives tensors from each source of `like` (dtypes and shapes), in order; `own` are this worker's."""
        others = {source: like_packed(specs) for source, specs in like.items() if source != self.me}
        came = self.exchange.receive_each(tag, others)
        return [list(own) if s == self.me else unpacked(came[s], specs) for s, specs in like.items()]


def _readers(group: Group, with_receivers: bool) -> Sequence[int]:
    return group.everyone if with_receivers else group.workers
