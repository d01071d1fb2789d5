"""DistributedDataset: every worker reads the same global batches, of which each keeps its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.runtime.batches import Share, group_rows, require_rows_for_all, share_of


class DistributedDataset:
    """Gives this worker its rows of each global batch; of arrays with different numbers of rows, of each its own.

    Args:
        dataset: of global batches: a `tf.data.Dataset`, or whatever gives nests of arrays whose first axes are
            examples; it has to give the same batches on every worker.
        replicas: for each replica, the index of its worker.
        worker: index of this worker.
        on_first: called with the first global batch.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        replicas: Sequence[int],
        worker: int,
        on_first: Callable[[Any], None] = lambda batch: None,
    ) -> None:
        self._dataset, self._replicas, self._worker = dataset, replicas, worker
        self._on_first: Callable[[Any], None] | None = on_first

    def __iter__(self) -> Iterator[Any]:
        """This worker's part of each batch; without rows, where there are fewer examples than workers.

        Raises:
            UnevenBatchError: the arrays of a batch have different numbers of rows, and one too few for all replicas.
        """
        for batch in self._dataset:
            if self._on_first is not None:
                on_first, self._on_first = self._on_first, None
                on_first(batch)
            self._require_rows(batch)
            yield tf.nest.map_structure(self._own_rows, batch)

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
