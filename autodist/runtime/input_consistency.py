"""Input consistency check: compares the workers' first batches to detect wrong feeds.

The workers must feed equal global batches, or each its own examples.
"""

from __future__ import annotations

import enum
import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.json_record import JSONRecord
from autodist.runtime.messages import Messages

log = logging.getLogger("autodist")

HASHED_BYTES = 16 << 20
"""Bytes of an array to hash; of a larger array, samples of this total size are hashed."""

_PIECE = 64 << 10

_SEED = (
    "Use one seed on every worker: keras.utils.set_random_seed(1) at the start of the script, "
    "np.random.default_rng(1) for a separate generator"
)


class FeedRole(enum.StrEnum):
    """The role of an array."""

    GLOBAL = "global"  # the global batch; each worker keeps its share
    OWN = "own"  # a worker's own examples
    WHOLE = "whole"  # passed whole to every replica


@dataclass(frozen=True)
class FedInput:
    """One array of a batch.

    Attributes:
        name: the script's name for the array.
        role: role of the array.
        digest: digest of shape and values; "" without values.
    """

    name: str
    role: FeedRole
    digest: str


@dataclass(frozen=True)
class FirstBatch(JSONRecord):
    """The arrays that a worker feeds to a step in the step's first run.

    Attributes:
        worker: index of the worker.
        step: identifies the step; equal on all workers.
        fed: arrays in the order of the step's inputs.
    """

    worker: int
    step: str
    fed: tuple[FedInput, ...]


def digest_of(value: Any) -> str:
    """Returns a hash of an array's shape, dtype and values; "" if it has no values."""
    array = np.asarray(value)
    if not array.size:
        return ""
    digest = hashlib.blake2b(f"{array.shape} {array.dtype}".encode(), digest_size=16)
    if array.dtype.hasobject:
        digest.update(repr(array.ravel()[: HASHED_BYTES // 64].tolist()).encode())
        return digest.hexdigest()
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if content.size <= HASHED_BYTES:
        digest.update(content.data)
    else:
        for start in np.linspace(0, content.size - _PIECE, HASHED_BYTES // _PIECE, dtype=np.int64):
            digest.update(content[start : start + _PIECE].data)
    return digest.hexdigest()


def find_faults(batches: Sequence[FirstBatch], names: Sequence[str]) -> dict[str, str]:
    """Returns the faults in one step's first batches as messages, by kind of fault.

    Args:
        batches: first batches of the workers that have replicas.
        names: names of all workers, by index.
    """
    faults = {}
    if what := _differing(batches, FeedRole.GLOBAL, names):
        faults["global"] = (
            f"the workers feed different data, but all must feed the same global batch: {what}. Each worker "
            f"trains on its share of its own data, so some examples are missed and others used twice. {_SEED}; read "
            "files in one order (sorted). If each worker is to feed its own examples, set batch='per_worker' (in the "
            "YAML, batch: per_worker)."
        )
    if what := _differing(batches, FeedRole.WHOLE, names):
        faults["whole"] = (
            f"the workers pass different values, but all must pass the same, since each replica gets them whole: "
            f"{what}. Each replica computes with its worker's value. Pass the same value on every worker."
        )
    if what := _equal(batches, names):
        faults["own"] = (
            f"{what} feed the same examples, though each worker's feed is its own part of the batch: they all train on "
            "the same examples. Give each worker other examples: x[ad.worker_index::ad.num_workers], or "
            "ad.distribute_dataset of global batches. Or use @ad.function(batch='global') (for a session, batch: "
            "global in the YAML): each worker then keeps its share of the common batch."
        )
    return faults


def _differing(batches: Sequence[FirstBatch], role: FeedRole, names: Sequence[str]) -> str:
    """Describes the arrays that differ from the first worker's, with their workers; "" if none differs."""
    first, *others = batches
    where: dict[str, list[str]] = defaultdict(list)
    for at, fed in enumerate(first.fed):
        if fed.role == role:
            where[fed.name] += [names[b.worker] for b in others if b.fed[at : at + 1] != (fed,)]
    parts = [f"{name} of {_and(dict.fromkeys(workers))}" for name, workers in where.items() if workers]
    return f"{', '.join(parts)} differs from that of {names[first.worker]}" if parts else ""


def _equal(batches: Sequence[FirstBatch], names: Sequence[str]) -> str:
    by_content: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for batch in batches:
        own = tuple(f.digest for f in batch.fed if f.role == FeedRole.OWN)
        if any(own):
            by_content[own].append(names[batch.worker])
    return "; ".join(_and(workers) for workers in by_content.values() if len(workers) > 1)


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


class InputConsistencyCheck:
    """Compares, on the chief, the workers' feeds in the first run of each training step.

    The check is asynchronous: a worker sends digests before its first run of a step. The chief has received them when
    its own run has finished, or some runs later if no synchronizer is synchronous.

    Args:
        worker: index of this worker.
        names: names of all workers, by index.
        with_replicas: indices of the workers whose data is used.
        messages: transport to the chief; returns None before the workers have joined.
        guard: wraps calls that may fail because another worker went away.
    """

    def __init__(
        self,
        worker: int,
        names: Sequence[str],
        with_replicas: frozenset[int],
        messages: Callable[[], Messages | None],
        guard: Callable[..., Any],
    ) -> None:
        self._worker, self._names, self._with_replicas = worker, names, with_replicas
        self._messages, self._guard = messages, guard
        self._unsent: list[bytes] = []
        self._open: dict[str, dict[int, FirstBatch]] = defaultdict(dict)
        self._count: Counter[str] = Counter()
        self._reported: set[str] = set()

    def record(self, kind: str, fed: Iterable[tuple[str, Any, FeedRole]]) -> None:
        """Records the feeds of a step that this worker has not run yet.

        Args:
            kind: kind of step; all workers report the steps of one kind in the same order.
            fed: name, array and role of each feed.
        """
        if self._worker not in self._with_replicas or len(self._with_replicas) == 1:
            return
        self._count[kind] += 1
        step = f"{kind} {self._count[kind]}"
        first = FirstBatch(self._worker, step, tuple(FedInput(name, role, digest_of(a)) for name, a, role in fed))
        if self._worker == 0:
            self._open[step][0] = first
        else:
            self._unsent.append(first.encode())

    def record_data_set(self, batch: Any) -> None:
        """Records the first global batch of a data set; this worker uses its share of it."""
        arrays = tf.nest.flatten(batch, expand_composites=True)
        self.record(
            "data set", [(f"array {k} of the data set", array, FeedRole.GLOBAL) for k, array in enumerate(arrays)]
        )

    def send(self) -> None:
        """Before a step, sends the chief the recorded feeds that were not sent yet."""
        messages = self._messages()
        if messages is not None:
            while self._unsent:
                self._guard(messages.post, self._unsent.pop(0))

    def report_faults(self) -> None:
        """On the chief, after a step, logs a warning for each fault, once."""
        if not self._open:
            return
        messages = self._messages()
        if messages is None:
            return
        for message in self._guard(messages.posted):
            batch = FirstBatch.decode(message)
            self._open[batch.step][batch.worker] = batch
        for step in [s for s, batches in self._open.items() if batches.keys() == self._with_replicas]:
            batches = self._open.pop(step)
            faults = find_faults([batches[w] for w in sorted(batches)], self._names)
            for fault in faults.keys() - self._reported:
                log.warning("%s", faults[fault])
            self._reported |= faults.keys()
