"""The parts of a batch that all workers feed, brought to the chief, which alone feeds a pipeline."""

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
    "Under a pipeline the parts of all workers are joined to one batch: pad them to one length, or let every worker "
    'feed the whole batch (@ad.function(batch="global"); for a session, batch: global in the YAML).'
)


@dataclass(frozen=True)
class GatheredInput:
    """One array of what a worker feeds.

    Attributes:
        name: as the script knows it.
        value: the array.
        axis: along which the examples stand; None: every replica gets the whole.
        is_padded: rows are padded with zeros to the longest, of whatever worker.
    """

    name: str
    value: np.ndarray
    axis: int | None
    is_padded: bool = False


@dataclass(frozen=True)
class WholeFed:
    """What a worker feeds once the parts were brought together.

    Attributes:
        values: on the chief the whole batch, on the others no rows.
        worker: the index of this one.
        rows: for each array that is split, how many rows each worker has fed.
    """

    values: Sequence[np.ndarray]
    worker: int
    rows: Sequence[Sequence[int]]

    @property
    def all_examples(self) -> int:
        """How many examples all workers have fed."""
        return sum(self.rows[0])

    @property
    def examples(self) -> int:
        """How many of them this worker feeds now."""
        return self.all_examples if self.worker == 0 else 0

    def own_rows(self, results: Sequence[np.ndarray], axes: Sequence[int | None]) -> list[np.ndarray]:
        """What a step returned, with the rows of this worker's own examples alone.

        Args:
            results: values of the step's outputs.
            axes: for each, along which its rows belong to examples; None: they do not.

        Raises:
            CaptureError: an output does not have as many rows for each example; on all workers.
        """
        return [r if axis is None else self._own_rows(r, axis) for r, axis in zip(results, axes, strict=True)]

    def _own_rows(self, result: np.ndarray, axis: int) -> np.ndarray:
        length = result.shape[axis]
        fitting = [counts for counts in self.rows if sum(counts) and length % sum(counts) == 0]
        if not fitting:
            raise CaptureError(
                f"a step returns {length} rows of {self.all_examples} examples that several workers have fed, and the "
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
    """Brings what all workers feed to the chief, in the order of the workers; all of them call it alike.

    Args:
        fed: by this worker; at least one array is split.
        worker: its index.
        gather: gives the chief what each worker says, and others nothing.
        exchange: gives all workers what the chief says.

    Raises:
        CaptureError: the parts cannot be joined; on all workers.
        ClusterError: the chief is not in this step, but somewhere else in its script.
        EmptyBatchError: no worker has examples; on all workers.
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
    """What the chief says of the parts, which it does not say where it has come to another call."""
    try:
        told = json.loads(said)
    except ValueError:
        told = None
    if isinstance(told, dict) and ("rows" in told or "refusal" in told):
        return told
    raise ClusterError(
        "this worker makes a step, and the chief has come to another call: every worker has to make the same steps. "
        "See that each has as many batches."
    )


def _joined(split: Sequence[GatheredInput], parts: Sequence[Sequence[np.ndarray]]) -> tuple[list[np.ndarray], bytes]:
    """The whole arrays, and what the chief says of them."""
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
