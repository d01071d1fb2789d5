"""Sampler: one global order of record numbers, shared by all workers; each worker computes its own part."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from autodist.batch.examples import share_of
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")


class Sampler(tf.train.experimental.PythonState):
    """Iterates over the numbers of the records that this worker reads, by global batch; one iteration is an epoch.

    Batch t is the same set of records for any number of workers. Numbers are computed on demand, without a stored
    permutation. A checkpoint that contains the sampler (`ad.checkpoint(folder, data=sampler)`) saves its position:
    after `restore`, the next iteration continues there.

    Args:
        records: number of records.
        batch: records in a global batch; the last one of an epoch may have fewer.
        seed: seed of each epoch's order; None for epochs in order.
        drop_remainder: True to leave out a smaller last batch.
        replicas: index of the worker of each replica.
        worker: index of this worker.

    Attributes:
        on_request: called before each batch; None: no callback.

    Raises:
        ValueError: there are no records, or batches would be empty.
    """

    def __init__(
        self,
        records: int,
        batch: int,
        seed: int | None,
        drop_remainder: bool,
        replicas: Sequence[int],
        worker: int,
    ) -> None:
        if records < 1 or batch < 1:
            raise ValueError(f"a sampler of {records} records in batches of {batch}; both must be at least 1.")
        if drop_remainder and batch > records:
            raise ValueError(f"{records} records are fewer than a batch of {batch}, and drop_remainder leaves it out.")
        self._records, self._batch, self._seed, self._drops = records, batch, seed, drop_remainder
        self._replicas, self._worker = replicas, worker
        self._ended = 0  # epochs
        self._taken = 0  # batches of the one under way
        self._is_placed = False
        self.on_request: Callable[[], None] | None = None
        self._thread = threading.current_thread()
        self._is_read_ahead = self._is_skipped = False

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return self._records // self._batch if self._drops else math.ceil(self._records / self._batch)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yields this worker's numbers of each batch, as a vector; empty if it has no share of a small batch."""
        if not self._is_placed:
            self._taken = 0
        self._is_placed = False
        try:
            while self._has_more():
                self._taken += 1
                yield self._own_numbers(self._ended, self._taken - 1)
        finally:
            self._ended, self._taken = self._ended + 1, 0

    def skip(self, batches: int) -> Sampler:
        """Starts the next iteration this many batches after the first epoch's start; they may include whole epochs."""
        self._ended, self._taken = divmod(batches, len(self))
        self._is_placed = self._is_skipped = True
        return self

    def serialize(self) -> str:
        """Returns the position, for a checkpoint."""
        return json.dumps(self._place())

    def deserialize(self, string_value: str | bytes) -> None:
        """Continues, in the next iteration, at a saved position."""
        self._resume(json.loads(string_value))

    def place_in_loop(self) -> Callable[[], Any]:
        """Returns a function that returns the current position as JSON; None if another thread reads ahead."""
        place = self._place()
        return self._no_place if self._is_read_ahead else lambda: place

    def _no_place(self) -> None:
        if not self._is_skipped:
            log.warning(
                "a sampler is read in another thread than the one that has made it, ahead of the training steps, and "
                "its position is not saved in checkpoints: a resumed run starts it at its first batch. Start it at the "
                "right batch with sampler.skip(ad.steps_done).", extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
            self._is_skipped = True  # logged once

    def resume_in_loop(self, place: Any) -> None:
        """Continues at a saved position; an iteration whose batches were all taken is over, and the next one begins."""
        if place is None:
            return
        self._resume(place)
        if self._taken >= len(self):
            self._ended, self._taken = self._ended + 1, 0

    def _has_more(self) -> bool:
        if threading.current_thread() is not self._thread:
            self._is_read_ahead = True
        elif self.on_request is not None:
            self.on_request()
        return self._taken < len(self)

    def _place(self) -> dict[str, Any]:
        return {"ended": self._ended, "taken": self._taken, "order": self._order}

    def _resume(self, place: Mapping[str, Any]) -> None:
        self._ended, self._taken, self._is_placed = place["ended"], place["taken"], True
        if place["order"] != self._order:
            log.warning(
                "the position of a sampler of records, batch and seed %s is restored to one of %s, with other batches.",
                place["order"], self._order, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    @property
    def _order(self) -> list[int | None]:
        return [self._records, self._batch, self._seed]

    def _own_numbers(self, epoch: int, number: int) -> NDArray[np.int64]:
        start = number * self._batch
        share = share_of(min(self._batch, self._records - start), self._replicas, self._worker)
        positions = np.arange(start + share.start, start + share.start + share.size)
        if self._seed is None or not share.size:
            return positions
        with tf.device("/cpu:0"):
            numbers = tf.random.experimental.index_shuffle(positions, (self._seed, epoch), self._records - 1)
            return np.asarray(numbers)
