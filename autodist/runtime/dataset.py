"""DistributedDataset: every worker reads the same global batches, of which each keeps its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.errors import UnevenBatchError
from autodist.runtime.batches import Share, share_of


class DistributedDataset:
    """Gives this worker its rows of each global batch.

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
            UnevenBatchError: if the arrays of a batch disagree in their number of examples.
        """
        for batch in self._dataset:
            if self._on_first is not None:
                on_first, self._on_first = self._on_first, None
                on_first(batch)
            share = share_of(_examples(batch), self._replicas, self._worker)
            yield tf.nest.map_structure(lambda value, share=share: _rows(value, share), batch)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]


def _examples(batch: Any) -> int:
    counts = {n for value in tf.nest.flatten(batch) if (n := _length(value)) is not None}
    if len(counts) != 1:
        raise UnevenBatchError(
            f"the arrays of a global batch have {sorted(counts)} rows; each needs one row for each example."
        )
    return counts.pop()


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
    return value if _length(value) is None else value[share.start : share.start + share.size]
