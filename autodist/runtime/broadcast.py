"""Variable broadcast: sends the chief's values to all workers; each forwards common values and assigns its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from autodist.compressors.values import ValueCode
from autodist.graph.devices import Home, cpu_of
from autodist.graph.inboxes import Inbox, queue_of
from autodist.runtime.batched_transfers import TRANSFER_BYTES, BatchedTransfer, ByteRange, Listing, TransferPart
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.heaps import FreedBytes

_CAPACITY = 1
"""Messages queued at the source and at the reader; some more are on the way."""

_ALIGNED = 64
"""Alignment in bytes of values in messages and in memory: TensorFlow reuses aligned memory, and copies other memory."""

_KEPT_BYTES = 4 * TRANSFER_BYTES
"""Bytes of values that the sender keeps: parts that wait for the rest of a message are not much more."""

_Writes = tuple[tf.Tensor, list[tf.Operation]]


class VariableBroadcast:
    """One worker's end of the broadcast.

    Values for all workers are broadcast along a tree. Inner workers forward a message while the next one arrives, as
    MPI libraries do for long messages. (Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
    broadcast", 2009.)

    Args:
        graph_runners: run the transfers.
        worker: index of this worker; 0 is the chief.
        workers: number of workers.
        home: returns the device on which a worker keeps a variable of a dtype.
    """

    def __init__(self, graph_runners: GraphRunners, worker: int, workers: int, home: Home) -> None:
        self.worker, self.workers = worker, workers
        self._graph_runner, self._loops, self._home = graph_runners.control, graph_runners.inbox_loops, home
        self._sends: dict[tuple[int, ...] | int, Callable[..., object]] = {}
        self._receives: dict[tuple[int, tuple[int, ...], bool], Callable[..., list[np.ndarray]]] = {}
        self._writes: dict[TransferPart, _Writes] = {}

    def send(self, listing: Listing, read: Callable[[int], np.ndarray]) -> None:
        """On the chief, sends the values of a listing; returns when all values are on the way.

        Args:
            listing: the listing, equal to that of the receivers.
            read: returns the value of a variable, by its position among the variables to send.
        """
        recent, freed = _RecentReads(read), FreedBytes()
        known: tuple[int, np.ndarray] | None = None
        for transfer in listing.transfers:
            pieces = []
            for one in transfer.slices:
                part = listing.parts[one.part]
                if known is None or known[0] != one.part:
                    known = None  # before the next value is read
                    known = (one.part, _bytes_of(_cut(recent.read(part.value), part)))
                pieces.append(known[1] if one.stop < 0 else known[1][one.start : one.stop])
            lengths = np.array([len(piece) for piece in pieces], np.int64)
            content = pieces[0] if len(pieces) == 1 else _join(pieces)
            del pieces
            self._send(transfer, listing)(content, lengths)
            del content
            freed.add(int(lengths.sum()))

    def receive(self, listing: Listing) -> None:
        """On another worker, receives and assigns its values and forwards common ones; returns when that is done."""
        transfers = listing.to(self.worker)
        for one in (one for transfer in transfers for one in transfer.slices):  # adds all nodes before the first run
            self._writes_of(listing.parts[one.part])
        incomplete: dict[int, np.ndarray] = {}
        freed = FreedBytes()
        for transfer in transfers:
            content, lengths = self._receive(transfer, listing)()
            feeds: dict[tf.Tensor, np.ndarray] = {}
            writes: list[tf.Operation] = []
            for one, piece in zip(transfer.slices, _split(content, lengths), strict=True):
                part = listing.parts[one.part]
                content_of_part = _assemble(incomplete, part, one, piece)
                if content_of_part is not None:
                    placeholder, operations = self._writes_of(part)
                    feeds[placeholder] = _value_of(content_of_part, part)
                    writes += operations
            del content
            if writes:
                self._graph_runner.session.run(writes, feeds)
            freed.add(int(lengths.sum()))

    # -- messages --------------------------------------------------------------------------------------------------

    def _send(self, transfer: BatchedTransfer, listing: Listing) -> Callable[..., object]:
        """Returns a callable that sends a message from the chief."""
        is_for_all = transfer.to is None
        key = tuple(listing.after(0)) if transfer.to is None else transfer.to
        if key not in self._sends:
            with self._graph_runner.graph.as_default():
                with tf.device(cpu_of(self.worker, self.workers)):
                    placeholders = [tf.compat.v1.placeholder(dtype, [None]) for dtype in (tf.uint8, tf.int64)]
                to = listing.after(0) if transfer.to is None else [transfer.to]
                sends = [self._queue(_inbox(0, w, is_for_all)).enqueue(placeholders) for w in to]
            self._sends[key] = self._graph_runner.callable([], sends, [t.name for t in placeholders])
        return self._sends[key]

    def _receive(self, transfer: BatchedTransfer, listing: Listing) -> Callable[..., list[np.ndarray]]:
        """Returns a callable that receives the next message on another worker, and forwards a message for all."""
        is_for_all = transfer.to is None
        source = listing.before(self.worker) if is_for_all else 0
        after = tuple(listing.after(self.worker)) if is_for_all else ()
        key = (source, after, is_for_all)
        if key not in self._receives:
            inbox = _inbox(source, self.worker, is_for_all)
            with self._graph_runner.graph.as_default():
                message = self._queue(inbox).dequeue()
                sends = [self._queue(_inbox(self.worker, w, is_for_all)).enqueue(message) for w in after]
            self._receives[key] = self._graph_runner.callable(message, sends, [])
            self._loops.start([inbox])
        return self._receives[key]

    def _queue(self, inbox: Inbox) -> tf.queue.FIFOQueue:
        """Returns this worker's queue: an inbox, or the outbox for the inbox of another worker."""
        return queue_of(inbox, cpu_of(self.worker, self.workers))

    # -- values ----------------------------------------------------------------------------------------------------

    def _writes_of(self, part: TransferPart) -> _Writes:
        """Returns the placeholder that is fed with a part, and the operations that assign it on this worker."""
        if part not in self._writes:
            self._writes[part] = self._make_writes(part)
        return self._writes[part]

    def _make_writes(self, part: TransferPart) -> _Writes:
        dtype = tf.as_dtype(part.dtype)
        operations = []
        with (
            self._graph_runner.graph.as_default(),
            tf.device(self._home(self.worker, tf.int64 if part.on_cpu else dtype, part.device)),
        ):
            placeholder = tf.compat.v1.placeholder(dtype, part.shape)
            for held in part.held_by(self.worker):
                # A fed array is NumPy's. As a variable it would be replaced by its first update, and not freed before
                # Python calls TensorFlow again: all through the first step, it would be in memory twice.
                own = tf.raw_ops.DeepCopy(x=placeholder)
                value = ValueCode.of(held.encoding, part.shape, dtype).rounded(own)
                handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=part.shape, shared_name=held.suffix)
                operations.append(tf.raw_ops.AssignVariableOp(resource=handle, value=value))
        return placeholder, operations


class _RecentReads:
    """Reads values, and keeps the last ones, since parts of one value are in messages that follow each other closely.

    Args:
        read: returns a value by its position.
    """

    def __init__(self, read: Callable[[int], np.ndarray]) -> None:
        self._read = read
        self._values: dict[int, np.ndarray] = {}

    def read(self, position: int) -> np.ndarray:
        value = self._values.pop(position, None)
        if value is None:
            while sum(held.nbytes for held in self._values.values()) > _KEPT_BYTES:
                del self._values[next(iter(self._values))]
            value = np.asarray(self._read(position))
        self._values[position] = value  # the last one
        return value


def _inbox(source: int, to: int, is_for_all: bool) -> Inbox:
    """Returns the inbox of a worker for messages to all workers, or for messages to it alone."""
    name = f"autodist/{'values' if is_for_all else 'own_values'}/{source}/{to}"
    return Inbox(name, source, (tf.uint8, tf.int64), None, _CAPACITY)


def _cut(value: np.ndarray, part: TransferPart) -> np.ndarray:
    place = tuple(slice(b, b + n) for b, n in zip(part.begin, part.shape, strict=True))
    return np.asarray(value)[place]


def _bytes_of(value: np.ndarray) -> np.ndarray:
    """Returns a value as bytes; shares its memory if that is contiguous and numeric.

    A part of a larger value is copied: messages on their way would keep the whole value.
    """
    if value.dtype.hasobject:
        return np.frombuffer(tf.make_tensor_proto(value).SerializeToString(), np.uint8)
    is_part = isinstance(value.base, np.ndarray) and value.base.nbytes > value.nbytes
    own = value.copy() if is_part else np.ascontiguousarray(value)
    return own.reshape(-1).view(np.uint8)


def _value_of(content: np.ndarray, part: TransferPart) -> np.ndarray:
    dtype = tf.as_dtype(part.dtype)
    if dtype == tf.string:
        proto = tensor_pb2.TensorProto.FromString(content.tobytes())
        return np.asarray(tf.make_ndarray(proto), object).reshape(part.shape)
    return content.view(dtype.as_numpy_dtype).reshape(part.shape)


def _padded(length: int) -> int:
    return math.ceil(length / _ALIGNED) * _ALIGNED


def _join(pieces: Sequence[np.ndarray]) -> np.ndarray:
    content = np.zeros(sum(_padded(len(piece)) for piece in pieces), np.uint8)
    start = 0
    for piece in pieces:
        content[start : start + len(piece)] = piece
        start += _padded(len(piece))
    return content


def _split(content: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    starts = np.cumsum([0, *map(_padded, lengths)])
    return [content[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _assemble(
    incomplete: dict[int, np.ndarray], part: TransferPart, one: ByteRange, piece: np.ndarray
) -> np.ndarray | None:
    """Adds received bytes to a part; returns all of its bytes once they are complete, until then None.

    Args:
        incomplete: received bytes, by part; updated.
        part: the part.
        one: the range of bytes in the part.
        piece: the bytes.
    """
    if one.stop < 0:
        return piece
    if one.part not in incomplete:
        memory = np.empty(part.byte_size + _ALIGNED, np.uint8)
        begin = -memory.ctypes.data % _ALIGNED
        incomplete[one.part] = memory[begin : begin + part.byte_size]
    incomplete[one.part][one.start : one.stop] = piece
    return incomplete.pop(one.part) if one.stop == part.byte_size else None
