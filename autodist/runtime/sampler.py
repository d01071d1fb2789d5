"""Sampler: one global order of records, of which each worker knows the numbers of its own."""

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
    """The numbers of the records that this worker reads, global batch by global batch; an iteration is an epoch.

    Batch t is the same set of records whatever the number of workers. The numbers are computed as they are asked for:
    no permutation is held, however many records there are. A checkpoint that is told of it
    (`ad.checkpoint(folder, data=sampler)`) has its place: after `restore`, the next iteration goes on where it was.

    Args:
        records: how many there are.
        batch: how many a global batch has; the last one of an epoch may have fewer.
        seed: from which each epoch's order is drawn; None: all epochs are in order.
        drop_remainder: whether a last batch that would have fewer is left out.
        replicas: for each replica, the index of its worker.
        worker: index of this worker.

    Attributes:
        on_request: called before it is asked for a batch; None: nobody wants to know.

    Raises:
        ValueError: there are no records, or batches would have none.
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
            raise ValueError(f"a sampler of {records} records in batches of {batch}; it needs one of each at least.")
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
        """How many batches an epoch has."""
        return self._records // self._batch if self._drops else math.ceil(self._records / self._batch)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """This worker's numbers of each batch, as a vector; an empty one where it has no share of a small batch."""
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
        """Lets the next iteration begin so many batches after the first of all, those of whole epochs included."""
        self._ended, self._taken = divmod(batches, len(self))
        self._is_placed = self._is_skipped = True
        return self

    def serialize(self) -> str:
        """Its place, for a checkpoint."""
        return json.dumps(self._place())

    def deserialize(self, string_value: str | bytes) -> None:
        """Goes on, with the next iteration, where another was."""
        self._go_on(json.loads(string_value))

    def place_in_loop(self) -> Callable[[], Any]:
        """Gives its place of now, as JSON has it; None where another thread reads ahead of the loop."""
        place = self._place()
        return self._no_place if self._is_read_ahead else lambda: place

    def _no_place(self) -> None:
        if not self._is_skipped:
            log.warning(
                "a sampler is read in another thread than the one that has made it, ahead of the steps that are made, "
                "and has no place in checkpoints: a run that goes on begins it with its first batch. Let it begin "
                "where the steps do: sampler.skip(ad.steps_done).", extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
            self._is_skipped = True  # it is told once

    def go_on_in_loop(self, place: Any) -> None:
        """Goes on where another was; an iteration of which all batches were taken is over, and the next one begins."""
        if place is None:
            return
        self._go_on(place)
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

    def _go_on(self, place: Mapping[str, Any]) -> None:
        self._ended, self._taken, self._is_placed = place["ended"], place["taken"], True
        if place["order"] != self._order:
            log.warning(
                "the place of a sampler of records, batch and seed %s is taken by one of %s, whose batches are others.",
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
            found = tf.random.experimental.index_shuffle(positions, (self._seed, epoch), self._records - 1)
            return np.asarray(found)
