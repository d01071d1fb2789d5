"""Batched transfers: the messages that carry variable values to all workers, and the tree that forwards them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import tensorflow as tf

from autodist.json_record import JSONRecord
from autodist.placement.holder import Copy
from autodist.runtime.variables import StoredVariable

TRANSFER_BYTES = 4 << 20
"""Approximate bytes of a message: several are on their way at once, and are forwarded when complete."""

_MAX_PENDING = 4
"""Messages' worth of bytes that wait to be batched; with more owners than this, messages are smaller."""

_FAN_OUT = 2
"""Number of workers to which each forwards common values: the first link carries them this often, for any cluster."""


@dataclass(frozen=True)
class TransferPart:
    """A slice of a variable, sent unchanged to all its holders.

    Attributes:
        value: position of the variable among those to send.
        name: name of the part in the session.
        dtype: name of the dtype.
        begin: offset in the variable, on each axis.
        shape: length on each axis.
        owner: the worker that holds the part; None: every worker.
        copies: the additional copies on workers.
        on_cpu: True if the holders keep the part on their CPUs, whatever its dtype.
        device: the device of the owner that the part is on; None: the first one of each holder.
    """

    value: int
    name: str
    dtype: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int | None
    copies: tuple[Copy, ...]
    on_cpu: bool
    device: str | None = None

    @property
    def to(self) -> int | None:
        """The worker that receives it; None: every worker."""
        return None if self.copies else self.owner

    @property
    def byte_size(self) -> int:
        return prod(self.shape) * tf.as_dtype(self.dtype).size

    def held_by(self, worker: int) -> list[Copy]:
        """Returns the part, if a worker holds it, and its copies there, each with its full name as the suffix."""
        own = [Copy(self.name)] if self.owner in (None, worker) else []
        return own + Copy.held_beside(self.name, self.copies, worker, self.owner)


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes of a part.

    Attributes:
        part: position of the part in the listing.
        start: first byte.
        stop: end of the range, exclusive; -1: the complete part.
    """

    part: int
    start: int = 0
    stop: int = -1


@dataclass(frozen=True)
class BatchedTransfer:
    """A message.

    Attributes:
        to: the worker that receives the message; None: every worker.
        slices: content of the message.
    """

    to: int | None
    slices: tuple[ByteRange, ...]


@dataclass(frozen=True)
class Listing(JSONRecord):
    """The values that the chief sends to all workers, in order.

    Attributes:
        present: the workers that take part, the chief first; each forwards common values.
        parts: the parts of the variables.
        transfers: the messages that carry the parts.
    """

    present: tuple[int, ...]
    parts: tuple[TransferPart, ...]
    transfers: tuple[BatchedTransfer, ...]

    @classmethod
    def of(cls, values: Sequence[StoredVariable], present: Sequence[int]) -> Listing:
        """Returns the messages that carry the values of variables to the present workers other than the chief."""
        parts = tuple(_parts(values))
        return cls(tuple(present), parts, tuple(_transfers(parts, {*present[1:], None})))

    def after(self, worker: int) -> list[int]:
        """Returns the workers to which a worker forwards common values."""
        first = _FAN_OUT * self.present.index(worker) + 1
        return list(self.present[first : first + _FAN_OUT])

    def before(self, worker: int) -> int:
        """Returns the worker from which another one receives common values."""
        return self.present[(self.present.index(worker) - 1) // _FAN_OUT]

    def to(self, worker: int) -> list[BatchedTransfer]:
        """Returns the messages that a worker receives."""
        return [transfer for transfer in self.transfers if transfer.to in (None, worker)]


def _parts(values: Sequence[StoredVariable]) -> Iterator[TransferPart]:
    for k, kept in enumerate(values):
        for one in kept.slices:
            name, about = kept.shared_name + one.name, (kept.dtype.name, one.begin, one.shape)
            device = None if one.owner is None else one.device(one.owner)
            yield TransferPart(k, name, *about, one.owner, one.copies, kept.on_cpu, device)
            for other in () if one.group.is_all else one.group.workers[1:]:
                yield TransferPart(k, name, *about, other, (), kept.on_cpu, one.device(other))


def _transfers(parts: Sequence[TransferPart], to: set[int | None]) -> Iterator[BatchedTransfer]:
    pending: dict[int | None, list[int]] = {}
    size: dict[int | None, int] = {}

    def flush(worker: int | None) -> BatchedTransfer:
        del size[worker]
        return BatchedTransfer(worker, tuple(ByteRange(k) for k in pending.pop(worker)))

    for k, part in enumerate(parts):
        if part.to not in to:
            continue
        if part.byte_size > TRANSFER_BYTES and tf.as_dtype(part.dtype) != tf.string:
            for start in range(0, part.byte_size, TRANSFER_BYTES):
                yield BatchedTransfer(part.to, (ByteRange(k, start, min(start + TRANSFER_BYTES, part.byte_size)),))
            continue
        pending.setdefault(part.to, []).append(k)
        size[part.to] = size.get(part.to, 0) + part.byte_size
        if size[part.to] >= TRANSFER_BYTES:
            yield flush(part.to)
        elif sum(size.values()) >= _MAX_PENDING * TRANSFER_BYTES:
            yield flush(max(size, key=lambda worker: size[worker]))
    for worker in list(pending):
        yield flush(worker)
