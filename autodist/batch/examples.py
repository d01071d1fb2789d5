"""Batches: the number of examples and their split among workers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.errors import EmptyBatchError, UnevenBatchError
from autodist.graph.parts import EvenSharesRequired
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class Share:
    """The examples of one worker in a global batch.

    Attributes:
        start: index of the first example.
        size: number of examples.
    """

    start: int
    size: int


def share_of(examples: int, replicas: Sequence[int], worker: int) -> Share:
    """Returns the share of a worker: the parts of its replicas in order; empty if it has no replicas.

    Args:
        examples: number of examples in the global batch.
        replicas: for each replica, the index of its worker, in ascending order.
        worker: index of the worker.

    >>> [share_of(5, [0, 0, 1, 1], w) for w in (0, 1)]
    [Share(start=0, size=3), Share(start=3, size=2)]
    >>> share_of(5, [0, 1], 2)
    Share(start=0, size=0)
    """
    first, last = _part_range(replicas, worker)
    start, end = (_start_of(part, examples, len(replicas)) for part in (first, last))
    return Share(start, end - start)


def part_lengths(examples: int, parts: int) -> list[int]:
    """Returns the numbers of examples in the parts of a batch.

    >>> part_lengths(5, 3)
    [2, 2, 1]
    """
    starts = [_start_of(part, examples, parts) for part in range(parts + 1)]
    return [end - start for start, end in itertools.pairwise(starts)]


def rows_to_read(replicas: Sequence[int], worker: int) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function that computes the rows of a global batch that a worker must read.

    The function maps the number of examples to (index of the first row, number of rows), as tensors. They are the
    worker's share or, if that is empty, one row that is ignored, as for `take`.

    Args:
        replicas: for each replica, the index of its worker, in ascending order.
        worker: index of the worker.
    """
    first, last = _part_range(replicas, worker)

    def rows(examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start, end = (_start_of(part, examples, len(replicas), tf.minimum) for part in (first, last))
        size = end - start
        start = tf.where(size > 0, start, tf.minimum(start, tf.maximum(examples - 1, 0)))
        return start, tf.minimum(tf.maximum(size, 1), examples)

    return rows


def _part_range(replicas: Sequence[int], worker: int) -> tuple[int, int]:
    """Returns the first part of a worker and the one after its last."""
    mine = [k for k, w in enumerate(replicas) if w == worker]
    return (mine[0], mine[-1] + 1) if mine else (0, 0)


def _start_of(part: int, examples: Any, parts: int, least: Callable[[Any, int], Any] = min) -> Any:
    """Returns the first example of a part; if they do not divide evenly, the first parts have one more."""
    return examples // parts * part + least(examples % parts, part)


def count_examples(split: Sequence[tuple[str, Any, int]]) -> int:
    """Returns the number of examples of a batch.

    Args:
        split: name, array and batch axis of each split input.

    Raises:
        UnevenBatchError: two inputs have different numbers of examples.
    """
    counts = [(name, np.shape(value)[axis]) for name, value, axis in split]
    if len({count for _, count in counts}) > 1:
        counts_text = ", ".join(f"{name} has {count}" for name, count in counts)
        raise UnevenBatchError(
            f"the inputs of a step have different numbers of examples along their batch axes: {counts_text}. If an "
            "input does not have one row per example, set its batch_axis (None: every replica gets all of it)."
        )
    return counts[0][1] if counts else 0


def group_rows(counts: Sequence[int], known: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns the group of each input: inputs of one group have equally many rows, and the first is in group 0.

    Args:
        counts: number of rows of each input.
        known: groups of an earlier batch; inputs of different groups are never joined, even if their numbers agree by
            chance.

    >>> group_rows([24, 8, 8])
    (0, 1, 1)
    >>> group_rows([8, 8, 8], (0, 1, 1))
    (0, 1, 1)
    """
    keys = list(zip(known or [0] * len(counts), counts, strict=True))
    order = list(dict.fromkeys(keys))
    return tuple(order.index(key) for key in keys)


def require_rows_for_all(split: Sequence[tuple[str, int]], groups: Sequence[int], replicas: int) -> None:
    """Passes a batch whose inputs have one number of rows, or each at least one row for every replica.

    Args:
        split: name and number of rows of each split input.
        groups: group of each split input, as numbered by `group_rows`.
        replicas: number of replicas.

    Raises:
        UnevenBatchError: a replica would have rows of some inputs only.
    """
    few = next((name for name, rows in split if rows < replicas), None)
    if any(groups) and few is not None:
        raise UnevenBatchError(
            f"the inputs of a step have different numbers of rows along their batch axes: {format_rows(split)}. "
            f"Each is split separately, and each of {replicas} replicas needs at least one row, but {few} has too few. "
            "Feed more rows, or set its batch_axis (None: every replica gets all of it)."
        )


def format_rows(split: Sequence[tuple[str, int]]) -> str:
    """Returns the numbers of rows as text."""
    return ", ".join(f"{name} has {rows}" for name, rows in split)


def require_examples(are_there: bool) -> None:
    """Passes if a batch has examples.

    Raises:
        EmptyBatchError: the batch has none, so no mean exists.
    """
    if not are_there:
        raise EmptyBatchError("a global batch has no examples at all; remove such batches from the dataset.")


def require_even(even: EvenSharesRequired | None, mine: int | None, whole: int | None = None) -> None:
    """Passes unless this worker detects an uneven batch in a step that needs an even one.

    Args:
        even: the reason why it must be even.
        mine: number of examples of this worker, if known.
        whole: number of examples of all workers, if known.

    Raises:
        UnevenBatchError: replicas have different numbers of examples.
    """
    if even is None:
        return
    examples, among = (mine, even.here) if whole is None or even.is_own else (whole, even.replicas)
    if examples is not None and examples % among:
        each, rest = divmod(examples, among)
        raise uneven(
            even,
            f"a batch of {examples} examples does not divide evenly among {among} replicas ({rest} of them would get "
            f"{each + 1}, the others {each})",
            among,
        )


def warn_empty_micro_batches(examples: int, micro_batches: int) -> None:
    """Warns that a pipeline has more micro-batches than the batch has examples: its stages wait for each of them."""
    if 0 < examples < micro_batches:
        log.warning(
            "a batch of %d examples is split into %d micro-batches for the pipeline: %d of them are empty, but take "
            "as long as one with a single example. Feed more examples, or set fewer micro_batches.",
            examples, micro_batches, micro_batches - examples, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


def uneven(even: EvenSharesRequired, fault: str, among: int) -> UnevenBatchError:
    """Returns the error for replicas with different numbers of examples in a step that needs equal ones.

    Args:
        even: the reason why they must be equal.
        fault: the numbers, as text.
        among: number of replicas.
    """
    at = f" ({even.line})" if even.line else ""
    return UnevenBatchError(
        f"{fault}, and it is not known how the differentiated {even.target}{at} depends on the batch ({even.reason}). "
        "It is treated as a mean over examples, which requires equal numbers on all replicas. Train on batches of a "
        f"multiple of {among} examples, including the last one (another batch_size, fewer examples, or "
        "drop_remainder=True in the data set), with equally many for each replica on every worker. Or write the loss "
        "as arithmetic on means and sums over the batch. Or, if it compares examples, gather those of all replicas "
        "with tf.distribute.get_replica_context().all_gather(rows, axis=0). Or, if an input has no row for each "
        "example, set its batch_axis to None. Or train with one replica."
    )


def rows_of(value: Any, axis: int, share: Share) -> np.ndarray:
    """Returns a worker's rows, possibly none."""
    array = np.asarray(value)
    if share.size == array.shape[axis]:
        return array
    return array[(slice(None),) * axis + (slice(share.start, share.start + share.size),)]


def take(value: Any, axis: int, share: Share) -> np.ndarray:
    """Returns a worker's rows; one row that is ignored if it has none."""
    array = np.asarray(value)
    one = Share(min(share.start, max(array.shape[axis] - 1, 0)), 1)
    return rows_of(array, axis, share if share.size else one)


def with_a_row(value: Any, axis: int) -> np.ndarray:
    """Returns an array with a blank row if it has none, for ops that do not support empty batches."""
    array = np.asarray(value)
    if array.shape[axis]:
        return array
    shape = list(array.shape)
    shape[axis] = 1
    return blank(shape, array.dtype)


def blank(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an array of zeros, or of empty strings. TensorFlow's strings are NumPy's objects."""
    return np.full(shape, b"", dtype) if dtype.kind == "O" else np.zeros(shape, dtype)


def length_of(value: Any) -> int | None:
    """Returns the number of rows of a tensor or array, also sparse or ragged; None for a scalar."""
    if isinstance(value, tf.SparseTensor):
        return int(value.dense_shape[0])
    if isinstance(value, tf.RaggedTensor):
        return int(value.nrows())
    return int(np.shape(value)[0]) if np.ndim(value) else None


def slice_rows(value: Any, share: Share) -> Any:
    """Returns some rows of a tensor or array, also sparse or ragged."""
    if isinstance(value, tf.SparseTensor):
        others = value.dense_shape.numpy().tolist()[1:]
        return tf.sparse.slice(value, [share.start, *(0 for _ in others)], [share.size, *others])
    return value[share.start : share.start + share.size]
