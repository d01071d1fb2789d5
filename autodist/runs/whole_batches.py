"""Gathers the parts of a batch that all workers feed on the chief, which alone feeds a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from autodist.batch.examples import Share, require_examples, rows_of
from autodist.errors import CaptureError, ClusterError

_MEND = (
    "A pipeline concatenates the parts of all workers into one batch: pad them to one length, or let every worker feed "
    'the whole batch (@ad.function(batch="global"); for a session, batch: global in the YAML).'
)


@dataclass(frozen=True)
class GatheredInput:
    """One array that a worker feeds.

    Attributes:
        name: the script's name for it.
        value: the array.
        axis: batch axis; None: every replica gets the whole array.
        is_padded: True if rows are padded with zeros to the longest row of all workers.
    """

    name: str
    value: np.ndarray
    axis: int | None
    is_padded: bool = False


@dataclass(frozen=True)
class WholeFed:
    """The feeds of a worker after all parts were gathered on the chief.

    Attributes:
        values: on the chief the whole batch, on the others no rows.
        worker: index of this worker.
        rows: for each array that is split, the number of rows that each worker has fed.
    """

    values: Sequence[np.ndarray]
    worker: int
    rows: Sequence[Sequence[int]]

    @property
    def all_examples(self) -> int:
        """Number of examples that all workers have fed."""
        return sum(self.rows[0])

    @property
    def examples(self) -> int:
        """Number of examples that this worker feeds after gathering."""
        return self.all_examples if self.worker == 0 else 0

    def own_rows(self, results: Sequence[np.ndarray], axes: Sequence[int | None]) -> list[np.ndarray]:
        """Returns the outputs of a step, restricted to the rows of this worker's own examples.

        Args:
            results: values of the step's outputs.
            axes: batch axis of each output; None: it has no rows of examples.

        Raises:
            CaptureError: an output does not have the same number of rows for each example; raised on all workers.
        """
        return [r if axis is None else self._own_rows(r, axis) for r, axis in zip(results, axes, strict=True)]

    def _own_rows(self, result: np.ndarray, axis: int) -> np.ndarray:
        length = result.shape[axis]
        fitting = [counts for counts in self.rows if sum(counts) and length % sum(counts) == 0]
        if not fitting:
            raise CaptureError(
                f"a step returns {length} rows for {self.all_examples} examples that several workers have fed, and the "
                "rows of a worker's own examples are not known under a pipeline. Return a row for each example and "
                'filter it outside of the step, or let every worker feed the whole batch (@ad.function(batch="global")'
                "; for a session, batch: global in the YAML)."
            )
        counts, each = fitting[0], length // sum(fitting[0])
        return rows_of(result, axis, Share(sum(counts[: self.worker]) * each, counts[self.worker] * each))


def bring_together(
    fed: Sequence[GatheredInput],
    worker: int,
    gather: Callable[[bytes], list[bytes]],
    exchange: Callable[[bytes], bytes],
) -> WholeFed:
    """Gathers the feeds of all workers on the chief, in the order of the workers; a collective call.

    Args:
        fed: arrays that this worker feeds; at least one is split.
        worker: index of this worker.
        gather: returns on the chief the message of each worker, on the others an empty list.
        exchange: returns the chief's message on every worker.

    Raises:
        CaptureError: the parts cannot be concatenated; raised on all workers.
        ClusterError: the chief is not in this step, but in another call.
        EmptyBatchError: no worker has examples; raised on all workers.
    """
    split = [one for one in fed if one.axis is not None]
    parts = [_unpacked(said) for said in gather(_packed([one.value for one in split]))]
    joined, said = _joined(split, parts) if parts else ([], b"")
    told = _told(exchange(said))
    if "refusal" in told:
        raise CaptureError(told["refusal"])
    whole = iter(joined)
    values = [
        one.value if one.axis is None else next(whole) if worker == 0 else rows_of(one.value, one.axis, Share(0, 0))
        for one in fed
    ]
    made = WholeFed(values, worker, told["rows"])
    require_examples(made.all_examples > 0)
    return made


def _told(said: bytes) -> dict[str, Any]:
    """Decodes the chief's message about the parts.

    Raises:
        ClusterError: the message belongs to another call.
    """
    try:
        told = json.loads(said)
    except ValueError:
        told = None
    if isinstance(told, dict) and ("rows" in told or "refusal" in told):
        return told
    raise ClusterError(
        "this worker makes a step, and the chief has come to another call: every worker has to make the same steps. "
        "Check that all workers have the same number of batches."
    )


def _joined(split: Sequence[GatheredInput], parts: Sequence[Sequence[np.ndarray]]) -> tuple[list[np.ndarray], bytes]:
    """Returns the whole arrays, and the chief's message about them."""
    joined, rows = [], []
    for one, arrays in zip(split, zip(*parts, strict=True), strict=True):
        axis = one.axis or 0
        given = _padded(arrays) if one.is_padded else arrays
        first = given[0]
        for worker, array in enumerate(given):
            if array.dtype != first.dtype or _beside(array, axis) != _beside(first, axis):
                told = (
                    f"worker {worker} feeds {one.name} as {array.dtype} of shape {array.shape}, and the chief as "
                    f"{first.dtype} of shape {first.shape}. {_MEND}"
                )
                return [], json.dumps({"refusal": told}).encode()
        joined.append(np.concatenate(given, axis))
        rows.append([array.shape[axis] for array in given])
    return joined, json.dumps({"rows": rows}).encode()


def _beside(array: np.ndarray, axis: int) -> tuple[int, ...]:
    return tuple(n for a, n in enumerate(array.shape) if a != axis)


def _padded(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    longest = max(array.shape[1] for array in arrays)
    return [_longer(array, longest) for array in arrays]


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    nothing = b"" if array.dtype == object else 0  # TensorFlow's strings are NumPy's objects
    longer = np.full((array.shape[0], length, *array.shape[2:]), nothing, array.dtype)
    longer[:, : array.shape[1]] = array
    return longer


def _packed(arrays: Sequence[np.ndarray]) -> bytes:
    protos = [tf.make_tensor_proto(array).SerializeToString() for array in arrays]
    packed: bytes = tf.make_tensor_proto(np.array(protos, object)).SerializeToString()
    return packed


def _unpacked(said: bytes) -> list[np.ndarray]:
    return [_array(one) for one in _array(said)]


def _array(said: bytes) -> np.ndarray:
    array: np.ndarray = tf.make_ndarray(tensor_pb2.TensorProto.FromString(said))
    return array
