"""Shipments: the messages by which the values of variables go to all workers, and who hands each on to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import tensorflow as tf

from autodist.graph.placement import EVERY_WORKER
from autodist.runtime.variables import Kept

SHIPMENT_BYTES = 16 << 20
"""A message has about so many: what is under way lies in memory twice, and is handed on when it has come whole."""

_PENDING = 4
"""Shipments' worth of bytes that wait to be sent together; more owners than that get smaller messages."""

_HANDED_ON = 2
"""To how many workers each hands on what all get: the first link carries it so many times, however many there are."""


@dataclass(frozen=True)
class TransferPart:
    """A variable or a shard of one, which goes to all its holders as it is.

    Attributes:
        value: the variable, by its place among those that are given.
        name: under which the session has the part.
        dtype: the name of its type.
        begin: where it begins in the variable, on each axis.
        shape: its length on each axis.
        owner: the worker that holds it, or `EVERY_WORKER`.
        copies: what is appended to its name for copies that every worker has besides.
        on_cpu: whether its holders keep it on their CPUs, whatever its type.
    """

    value: int
    name: str
    dtype: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    copies: tuple[str, ...]
    on_cpu: bool

    @property
    def to(self) -> int:
        """The worker that is to have it, or `EVERY_WORKER`."""
        return EVERY_WORKER if self.copies else self.owner

    @property
    def byte_size(self) -> int:
        return prod(self.shape) * tf.as_dtype(self.dtype).size

    def names_on(self, worker: int) -> list[str]:
        """The names of the part, and of copies of it, on a worker."""
        own = [self.name] if self.owner in (EVERY_WORKER, worker) else []
        return own + [self.name + copy for copy in self.copies]


@dataclass(frozen=True)
class Slice:
    """Some bytes of a part.

    Attributes:
        part: by its place in the listing.
        start: the first of them.
        stop: behind the last of them; -1: the part is whole.
    """

    part: int
    start: int = 0
    stop: int = -1


@dataclass(frozen=True)
class BatchedTransfer:
    """A message.

    Attributes:
        to: the worker that gets it, or `EVERY_WORKER`.
        slices: what is in it.
    """

    to: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Listing:
    """What the chief gives to all workers, in the order in which it sends it.

    Attributes:
        present: those that take part, the chief first; each hands on what all get.
        parts: of the variables.
        shipments: in which they go.
    """

    present: tuple[int, ...]
    parts: tuple[TransferPart, ...]
    shipments: tuple[BatchedTransfer, ...]

    @classmethod
    def of(cls, values: Sequence[Kept], present: Sequence[int]) -> Listing:
        """In which messages the values of variables reach those that are present, the chief left out."""
        parts = tuple(_parts(values))
        return cls(tuple(present), parts, tuple(_shipments(parts, {*present[1:], EVERY_WORKER})))

    def after(self, worker: int) -> list[int]:
        """To whom a worker hands on what all get."""
        first = _HANDED_ON * self.present.index(worker) + 1
        return list(self.present[first : first + _HANDED_ON])

    def to(self, worker: int) -> list[BatchedTransfer]:
        """What a worker gets."""
        return [shipment for shipment in self.shipments if shipment.to in (EVERY_WORKER, worker)]

    def encode(self) -> str:
        parts = [[p.value, p.name, p.dtype, p.begin, p.shape, p.owner, p.copies, p.on_cpu] for p in self.parts]
        shipments = [[shipment.to, [[s.part, s.start, s.stop] for s in shipment.slices]] for shipment in self.shipments]
        return json.dumps([self.present, parts, shipments])

    @classmethod
    def decode(cls, told: str) -> Listing:
        present, parts, shipments = json.loads(told)
        return cls(
            tuple(present),
            tuple(TransferPart(v, n, t, tuple(b), tuple(s), o, tuple(c), cpu) for v, n, t, b, s, o, c, cpu in parts),
            tuple(BatchedTransfer(to, tuple(Slice(*one) for one in slices)) for to, slices in shipments),
        )


def _parts(values: Sequence[Kept]) -> Iterator[TransferPart]:
    for k, kept in enumerate(values):
        for shard in kept.shards:
            name, about = kept.shared_name + shard.name, (kept.dtype.name, shard.begin, shard.shape)
            yield TransferPart(k, name, *about, shard.owner, tuple(shard.copies), kept.on_cpu)
            for mate in shard.stage_group:
                yield TransferPart(k, name, *about, mate, (), kept.on_cpu)


def _shipments(parts: Sequence[TransferPart], to: set[int]) -> Iterator[BatchedTransfer]:
    pending: dict[int, list[int]] = {}
    size: dict[int, int] = {}

    def flush(worker: int) -> BatchedTransfer:
        del size[worker]
        return BatchedTransfer(worker, tuple(Slice(k) for k in pending.pop(worker)))

    for k, part in enumerate(parts):
        if part.to not in to:
            continue
        if part.byte_size > SHIPMENT_BYTES and tf.as_dtype(part.dtype) != tf.string:
            for start in range(0, part.byte_size, SHIPMENT_BYTES):
                yield BatchedTransfer(part.to, (Slice(k, start, min(start + SHIPMENT_BYTES, part.byte_size)),))
            continue
        pending.setdefault(part.to, []).append(k)
        size[part.to] = size.get(part.to, 0) + part.byte_size
        if size[part.to] >= SHIPMENT_BYTES:
            yield flush(part.to)
        elif sum(size.values()) >= _PENDING * SHIPMENT_BYTES:
            yield flush(max(size, key=lambda worker: size[worker]))
    for worker in list(pending):
        yield flush(worker)
