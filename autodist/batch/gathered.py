"""Gathers the parts of a batch that all workers feed on the chief, which alone feeds a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from autodist.batch.examples import Share, blank, require_examples, rows_of
from autodist.errors import CaptureError, ClusterError

_FIX = (
    "A pipeline concatenates the parts of all workers into one batch: pad them to one length, or let every worker feed "
    'the whole batch (@ad.function(batch="global"); for a session, batch: global in the YAML).'
)


@dataclass(frozen=True)
class GatheredInput:
    """One array that a worker feeds.

    Attributes:
        name: the script's name for the array.
        value: the array.
        axis: batch axis; None: every replica gets the whole array.
        is_padded: True if rows are padded with zeros to the longest row of all workers.
    """

    name: str
    value: np.ndarray
    axis: int | None
    is_padded: bool = False


@dataclass(frozen=True)
class GatheredFeeds:
    """The feeds of a worker after all parts were gathered on the chief.

    Attributes:
        values: the whole batch on the chief, and no rows on the others.
        worker: index of this worker.
        rows: number of rows that each worker has fed, for each split array.
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


def gather_feeds(
    fed: Sequence[GatheredInput],
    worker: int,
    gather: Callable[[bytes], list[bytes]],
    exchange: Callable[[bytes], bytes],
) -> GatheredFeeds:
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
    parts = [_unpack(message) for message in gather(_pack([one.value for one in split]))]
    joined, message = _concatenate(split, parts) if parts else ([], b"")
    reply = _decode_reply(exchange(message))
    if "refusal" in reply:
        raise CaptureError(reply["refusal"])
    arrays = iter(joined)
    values = [
        one.value if one.axis is None else next(arrays) if worker == 0 else rows_of(one.value, one.axis, Share(0, 0))
        for one in fed
    ]
    result = GatheredFeeds(values, worker, reply["rows"])
    require_examples(result.all_examples > 0)
    return result


def _decode_reply(message: bytes) -> dict[str, Any]:
    """Decodes the chief's message about the parts.

    Raises:
        ClusterError: the message belongs to another call.
    """
    try:
        reply = json.loads(message)
    except ValueError:
        reply = None
    if isinstance(reply, dict) and ("rows" in reply or "refusal" in reply):
        return reply
    raise ClusterError(
        "this worker makes a step, and the chief makes another call: every worker must make the same steps. "
        "Check that all workers have the same number of batches."
    )


def _concatenate(
    split: Sequence[GatheredInput], parts: Sequence[Sequence[np.ndarray]]
) -> tuple[list[np.ndarray], bytes]:
    """Returns the whole arrays, and the chief's message about them."""
    joined, rows = [], []
    for one, arrays in zip(split, zip(*parts, strict=True), strict=True):
        axis = one.axis or 0
        padded = _pad_all(arrays) if one.is_padded else arrays
        first = padded[0]
        for worker, array in enumerate(padded):
            if array.dtype != first.dtype or _other_axes(array, axis) != _other_axes(first, axis):
                fault = (
                    f"worker {worker} feeds {one.name} as {array.dtype} of shape {array.shape}, and the chief as "
                    f"{first.dtype} of shape {first.shape}. {_FIX}"
                )
                return [], json.dumps({"refusal": fault}).encode()
        joined.append(np.concatenate(padded, axis))
        rows.append([array.shape[axis] for array in padded])
    return joined, json.dumps({"rows": rows}).encode()


def _other_axes(array: np.ndarray, axis: int) -> tuple[int, ...]:
    return tuple(n for a, n in enumerate(array.shape) if a != axis)


def _pad_all(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    longest = max(array.shape[1] for array in arrays)
    return [_pad(array, longest) for array in arrays]


def _pad(array: np.ndarray, length: int) -> np.ndarray:
    longer = blank((array.shape[0], length, *array.shape[2:]), array.dtype)
    longer[:, : array.shape[1]] = array
    return longer


def _pack(arrays: Sequence[np.ndarray]) -> bytes:
    protos = [tf.make_tensor_proto(array).SerializeToString() for array in arrays]
    packed: bytes = tf.make_tensor_proto(np.array(protos, object)).SerializeToString()
    return packed


def _unpack(message: bytes) -> list[np.ndarray]:
    return [_decode_array(one) for one in _decode_array(message)]


def _decode_array(message: bytes) -> np.ndarray:
    array: np.ndarray = tf.make_ndarray(tensor_pb2.TensorProto.FromString(message))
    return array
