"""DistributedDataset: of global batches, which all workers draw alike, each has its share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.messages import ALIKE_EVERYWHERE
from autodist.own_batches import Reading, whole_of
from autodist.own_elements import reading_own
from autodist.runtime.batches import Share, group_rows, require_rows_for_all, share_of
from autodist.runtime.seeds import seed_for_all

log = logging.getLogger("autodist")


class DistributedDataset(tf.train.experimental.PythonState):
    """Gives this worker its rows of each global batch; of arrays with different numbers of rows, of each its own.

    A checkpoint that is told of it (`ad.checkpoint(folder, data=data)`) has its place: after `restore`, the next loop
    over it goes on where it was, an epoch's order included.

    Args:
        dataset: of global batches: a `tf.data.Dataset`, or whatever gives nests of arrays whose first axes are
            examples; it has to give the same batches on every worker.
        replicas: for each replica, the index of its worker.
        worker: index of this worker.
        on_first: called with the first global batch, or with what tells it from others.
        reading: how this worker reads its share alone, where it can; None: it reads all.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        replicas: Sequence[int],
        worker: int,
        on_first: Callable[[Any], None] = lambda batch: None,
        reading: Reading | None = None,
    ) -> None:
        self._dataset, self._replicas, self._worker = dataset, replicas, worker
        self._on_first: Callable[[Any], None] | None = on_first
        self._own = None if reading is None else reading_own(dataset, reading)
        self._made_under = seed_for_all()
        self._ended = 0  # iterations of the data set
        self._taken = 0  # batches of the one under way
        self._is_restored = False

    def __iter__(self) -> Iterator[Any]:
        """This worker's part of each batch; without rows, where there are fewer examples than workers.

        Raises:
            UnevenBatchError: the arrays of a batch have different numbers of rows, and one too few for all replicas.
        """
        batches = self._begin()
        try:
            for batch in batches:
                whole = whole_of(batches)
                self._tell_first(batch if whole is None else [array for _, array in whole.alike])
                mine = self._share_of(batch) if whole is None else self._that_count(batch, whole.examples)
                self._taken += 1
                yield mine
        finally:
            self._ended, self._taken = self._ended + 1, 0

    def _tell_first(self, batch: Any) -> None:
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first(batch)

    def _share_of(self, batch: Any) -> Any:
        self._require_rows(batch)
        return tf.nest.map_structure(self._own_rows, batch)

    def _that_count(self, rows: Any, examples: int) -> Any:
        """What is read, unless it stands for no rows."""
        if share_of(examples, self._replicas, self._worker).size:
            return rows
        return tf.nest.map_structure(lambda value: _rows(value, Share(0, 0)), rows)

    def serialize(self) -> str:
        """Its place, for a checkpoint."""
        return json.dumps({"ended": self._ended, "taken": self._taken, "seed": self._made_under})

    def deserialize(self, string_value: str | bytes) -> None:
        """Goes on, with the next iteration, where another was."""
        place = json.loads(string_value)
        self._ended, self._taken, self._is_restored = place["ended"], place["taken"], True
        if place["seed"] != self._made_under:
            log.warning(
                "the data set was made under the seed %s, and under %s in the run that has saved its place: where a "
                "shuffle has no seed of its own, its order is another. Call tf.random.set_seed before it is made.",
                self._made_under, place["seed"], extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def _begin(self) -> Iterator[Any]:
        """An iteration of the data set; the first after a restore begins where the other one was."""
        dataset: Iterable[Any] = self._dataset if self._own is None else self._own
        if not self._is_restored:
            self._taken = 0
            return iter(dataset)
        self._is_restored = False
        for _ in range(self._ended):
            iter(dataset)  # a shuffle draws a new order for each
        batches = iter(dataset)
        for _ in range(self._taken):
            next(batches, None)
        return batches

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def _require_rows(self, batch: Any) -> None:
        lengths = [_length(value) for value in tf.nest.flatten(batch)]
        split = [(f"array {k}", n) for k, n in enumerate(lengths) if n is not None]
        require_rows_for_all(split, group_rows([n for _, n in split]), len(self._replicas))

    def _own_rows(self, value: Any) -> Any:
        length = _length(value)
        return value if length is None else _rows(value, share_of(length, self._replicas, self._worker))


def _length(value: Any) -> int | None:
    """How many rows there are; None of what has none."""
    if isinstance(value, tf.SparseTensor):
        return int(value.dense_shape[0])
    if isinstance(value, tf.RaggedTensor):
        return int(value.nrows())
    return np.shape(value)[0] if np.ndim(value) else None


def _rows(value: Any, share: Share) -> Any:
    if isinstance(value, tf.SparseTensor):
        others = value.dense_shape.numpy().tolist()[1:]
        return tf.sparse.slice(value, [share.start, *(0 for _ in others)], [share.size, *others])
    return value[share.start : share.start + share.size]
