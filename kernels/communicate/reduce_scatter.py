"""ReduceScatter: encoded vectors are sent to their owners, which sum them, over the group or over subgroups first."""

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
"""The encoding of one vector."""


@dataclass(frozen=True)
class ReduceScatter:
    """Sums vectors over workers. Each vector has an owner, which adds the parts in worker order and broadcasts the sum.

    The owner adds its own part without encoding. All workers, the owner included, use the decoded sum. Each sender
    returns the error of its encoding, which a compressor may add to the next vector.

    Attributes:
        exchange: the communicator between workers.
        code: the encoding in which vectors are sent.
        then: the function that the owner applies to a sum before the broadcast.
        name: distinguishes the sums of one bucket.
    """

    exchange: Communicator
    code: Code
    then: Callable[[tf.Tensor], tf.Tensor]
    name: str

    @property
    def me(self) -> int:
        return self.exchange.me

    def at_once(self, vectors: Mapping[int, Like]) -> dict[int, Summed]:
        """Sums in two hops: each worker sends its vectors to their owners, and the owners broadcast the sums.

        Args:
            vectors: this worker's vectors by owner; their specs if the worker has no replicas.
        """
        return {owner: self._at_owner(owner, vector) for owner, vector in vectors.items()}

    def in_subgroups(self, transfers: SubgroupTransfers, vectors: Mapping[int, Like]) -> dict[int, Summed]:
        """Sums over subgroups first. Each rank of a subgroup handles the vectors whose owners have the same rank.

        A rank sums the vectors of its subgroup and sends the sums to the owners, which add them in subgroup order. The
        results return the same way, in the owner's encoding, so that all workers read the same bits.

        Args:
            transfers: the transfers within and between the subgroups.
            vectors: as in `at_once`; the owners are reducing ranks of their subgroups.
        """
        subgroups, rank = transfers.subgroups, transfers.my_rank
        by_rank = [
            {owner: vectors[owner] for owner in subgroups.across(k) if owner in vectors} for k in range(subgroups.ranks)
        ]
        errors, parts = self._to_ranks(transfers, by_rank) if self.exchange.contributes else ({}, [])
        bundles = [Bundle([self._specs(vector) for vector in by_owner.values()]) for by_owner in by_rank]
        made = None
        if rank is not None and parts:
            codes, rest = self._between_ranks(subgroups.across(rank), list(by_rank[rank]), parts)
            errors, made = errors | rest, bundles[rank].together(codes)
        received = transfers.broadcast_in_subgroup(self._sum, made, [bundle.like for bundle in bundles])
        return {
            owner: Summed(self.code.decode(code, vector.dtype), errors.get(owner))
            for by_owner, bundle, came in zip(by_rank, bundles, received, strict=True)
            for (owner, vector), code in zip(by_owner.items(), bundle.apart(came), strict=True)
        }

    @property
    def _piece(self) -> str:
        return f"{self.name}piece"

    @property
    def _sum(self) -> str:
        return f"{self.name}sum"

    def _at_owner(self, owner: int, part: Like) -> Summed:
        """Sums one vector at its owner and broadcasts the sum."""
        exchange, specs = self.exchange, self._specs(part)
        if owner != self.me:
            sent = self.code.encode(part) if exchange.contributes else None
            if sent is not None:
                exchange.send(owner, self._piece, sent)
            decoded = self.code.decode(exchange.receive(owner, self._sum, specs), part.dtype)
            return Summed(decoded, None if sent is None else part - self.code.decode(sent, part.dtype))
        came = [
            part if source == owner else self.code.decode(exchange.receive(source, self._piece, specs), part.dtype)
            for source in exchange.group.workers
        ]
        whole = self.then(ordered_sum(came))
        sent = self.code.encode(whole)
        exchange.broadcast(self._sum, sent)
        decoded = self.code.decode(sent, part.dtype)
        return Summed(decoded, whole - decoded)

    def _to_ranks(
        self, transfers: SubgroupTransfers, by_rank: Sequence[Mapping[int, tf.Tensor]]
    ) -> tuple[dict[int, tf.Tensor], list[list[tf.Tensor]]]:
        """Sends the vectors to the ranks of this subgroup that handle their owners.

        Returns:
            The encoding errors, by owner; and, on a reducing rank, each member's vectors for it.
        """
        mine = transfers.my_rank
        errors: dict[int, tf.Tensor] = {}
        messages: list[Sequence[Like]] = []
        for rank, by_owner in enumerate(by_rank):
            if rank == mine or not by_owner:
                messages.append(like_packed(self._specs(_end_to_end(by_owner))) if by_owner else [])
                continue
            vector = tf.concat(list(by_owner.values()), 0)
            sent = self.code.encode(vector)
            messages.append(packed(sent))
            rest = tf.split(vector - self.code.decode(sent, vector.dtype), [v.shape[0] for v in by_owner.values()])
            errors |= dict(zip(by_owner, rest, strict=True))
        came = transfers.scatter_to_ranks(self._piece, messages)
        if mine is None or not came:
            return errors, []
        own = list(by_rank[mine].values())
        like, lengths = _end_to_end(by_rank[mine]), [vector.shape[0] for vector in own]
        specs = self._specs(like)
        return errors, [
            own if source == self.me else tf.split(self.code.decode(unpacked(sent, specs), like.dtype), lengths)
            for source, sent in zip(transfers.my_group.workers, came, strict=True)
        ]

    def _between_ranks(
        self, across: Sequence[int], owners: Sequence[int], parts: Sequence[Sequence[tf.Tensor]]
    ) -> tuple[list[Coded], dict[int, tf.Tensor]]:
        """Sums over the subgroup and then, for this worker's own vector, over the subgroups.

        Args:
            across: the workers of equal rank, by subgroup.
            owners: those of them that have a vector.
            parts: by member of the subgroup, the vectors for these owners.

        Returns:
            The encoded sum of each owner; and the encoding errors of this worker's messages, by owner.
        """
        ours = {owner: ordered_sum(vectors) for owner, vectors in zip(owners, zip(*parts, strict=True), strict=True)}
        errors: dict[int, tf.Tensor] = {}
        for owner, vector in ours.items():
            if owner != self.me:
                sent = self.code.encode(vector)
                self.exchange.send(owner, f"{self._piece}_of_team", packed(sent))
                errors[owner] = vector - self.code.decode(sent, vector.dtype)
        codes: dict[int, Coded] = {}
        for owner, vector in ours.items():
            specs = self._specs(vector)
            if owner != self.me:
                came = self.exchange.receive(owner, f"{self._sum}_of_teams", like_packed(specs))
                codes[owner] = unpacked(came, specs)
                continue
            came_from_all = self.exchange.collect(f"{self._piece}_of_team", like_packed(specs), across)
            whole = self.then(
                ordered_sum(
                    [
                        vector if source == self.me else self.code.decode(unpacked(sent, specs), vector.dtype)
                        for source, sent in zip(across, came_from_all, strict=True)
                    ]
                )
            )
            codes[owner] = self.code.encode(whole)
            errors[owner] = whole - self.code.decode(codes[owner], vector.dtype)
            self.exchange.broadcast(f"{self._sum}_of_teams", packed(codes[owner]), across)
        return [codes[owner] for owner in owners], errors

    def _specs(self, vector: Like) -> list[tf.TensorSpec]:
        """Returns the specs of the encoding of a vector."""
        return self.code.specs(vector.shape[0], vector.dtype)


@dataclass(frozen=True)
class Bundle:
    """Encodings of several vectors in one message, with as many tensors as the encoding of one.

    Attributes:
        specs: the specs of each encoding.
    """

    specs: Sequence[Sequence[tf.TensorSpec]]

    @property
    def like(self) -> list[Like]:
        """The specs of the message; empty if there are no vectors."""
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
    """Returns the spec of the concatenated vectors of several owners."""
    vectors = list(by_owner.values())
    return tf.TensorSpec([sum(vector.shape[0] for vector in vectors)], vectors[0].dtype)


class AsItIs:
    """The identity encoding."""

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        return [vector]

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        return sent[0]

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([length], dtype)]
