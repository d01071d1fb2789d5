"""Batches: how many examples there are, and which of them are whose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.errors import EmptyBatchError, UnevenBatchError
from autodist.graph.parts import EvenParts
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class Share:
    """The examples of one worker in a global batch.

    Attributes:
        start: index of the first.
        size: how many.
    """

    start: int
    size: int


def share_of(examples: int, replicas: Sequence[int], worker: int) -> Share:
    """The share of a worker: the parts of its replicas, one behind the other; empty where it has no replicas.

    Args:
        examples: in the global batch.
        replicas: for each replica, the index of its worker, in rising order.
        worker: whose share is asked for.

    >>> [share_of(5, [0, 0, 1, 1], w) for w in (0, 1)]
    [Share(start=0, size=3), Share(start=3, size=2)]
    >>> share_of(5, [0, 1], 2)
    Share(start=0, size=0)
    """
    first, last = _parts_of(replicas, worker)
    start, end = (_start_of(part, examples, len(replicas)) for part in (first, last))
    return Share(start, end - start)


def rows_to_read(replicas: Sequence[int], worker: int) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """The rows of a global batch that a worker has to read: the index of the first, and how many, as tensors.

    They are its share or, where that is empty, one row that does not count, as for `take`.

    Args:
        replicas: for each replica, the index of its worker, in rising order.
        worker: whose rows are asked for.
    """
    first, last = _parts_of(replicas, worker)

    def rows(examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start, end = (_start_of(part, examples, len(replicas), tf.minimum) for part in (first, last))
        size = end - start
        start = tf.where(size > 0, start, tf.minimum(start, tf.maximum(examples - 1, 0)))
        return start, tf.minimum(tf.maximum(size, 1), examples)

    return rows


def _parts_of(replicas: Sequence[int], worker: int) -> tuple[int, int]:
    """The first part of a worker, and the one behind its last."""
    mine = [k for k, w in enumerate(replicas) if w == worker]
    return (mine[0], mine[-1] + 1) if mine else (0, 0)


def _start_of(part: int, examples: Any, parts: int, least: Callable[[Any, int], Any] = min) -> Any:
    """The first example of a part; the first parts have one more than the others, where they cannot be even."""
    return examples // parts * part + least(examples % parts, part)


def count_examples(split: Sequence[tuple[str, Any, int]]) -> int:
    """How many examples a batch has.

    Args:
        split: name, array and batch axis of what is split.

    Raises:
        UnevenBatchError: if two inputs disagree.
    """
    counts = [(name, np.shape(value)[axis]) for name, value, axis in split]
    if len({count for _, count in counts}) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts)
        raise UnevenBatchError(
            f"the inputs of a step have different numbers of examples along their batch axes: {told}. Where an input "
            "is not one row an example, say so with batch_axis (None: every replica gets the whole)."
        )
    return counts[0][1] if counts else 0


def group_rows(counts: Sequence[int], known: Sequence[int] | None = None) -> tuple[int, ...]:
    """The group of each input: inputs of one group have equally many rows, and the first is in group 0.

    Args:
        counts: of rows, by input.
        known: what was found for an earlier batch; what was apart there stays apart, where the numbers agree by chance.

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
        split: name and number of rows of what is split.
        groups: of each, as `group_rows` numbers them.
        replicas: over which they are split.

    Raises:
        UnevenBatchError: a replica would have rows of some inputs alone.
    """
    few = next((name for name, rows in split if rows < replicas), None)
    if any(groups) and few is not None:
        raise UnevenBatchError(
            f"the inputs of a step have different numbers of rows along their batch axes: {told_rows(split)}. Each is "
            f"split by its own, and {replicas} replicas need a row of each, at least, which {few} does not have. Feed "
            "more, or say so with batch_axis (None: every replica gets the whole)."
        )


def told_rows(split: Sequence[tuple[str, int]]) -> str:
    """The numbers of rows in words."""
    return ", ".join(f"{name} has {rows}" for name, rows in split)


def require_examples(are_there: bool) -> None:
    """Passes if a batch has examples.

    Raises:
        EmptyBatchError: it has none, so that there is nothing to take a mean of.
    """
    if not are_there:
        raise EmptyBatchError("a global batch has no examples at all; leave such batches out of the dataset.")


def require_even(even: EvenParts | None, mine: int | None, whole: int | None = None) -> None:
    """Passes unless this worker can tell that replicas get different numbers of examples, and they must not.

    Args:
        even: why they have to.
        mine: how many examples this worker has, where it is known.
        whole: how many all have, where it is known.

    Raises:
        UnevenBatchError: they do not.
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


def tell_of_empty_micro_batches(examples: int, micro_batches: int) -> None:
    """Says that a pipeline, whose stages wait for each micro-batch, has more of them than the batch has examples."""
    if 0 < examples < micro_batches:
        log.warning(
            "a batch of %d examples goes through the pipeline in %d micro-batches, of which %d are empty, and take as "
            "long as one of a single example. Feed more, or take fewer micro_batches.",
            examples, micro_batches, micro_batches - examples, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


def uneven(even: EvenParts, fault: str, among: int) -> UnevenBatchError:
    """The text of the error for replicas with different numbers of examples, where all need equally many.

    Args:
        even: why they do.
        fault: which numbers they have.
        among: how many replicas there are.
    """
    at = f" ({even.line})" if even.line else ""
    return UnevenBatchError(
        f"{fault}, and it is not known how {even.target}{at}, which is differentiated, depends on the batch "
        f"({even.reason}). It is taken for a mean over examples, which joins only where all have equally many. Train "
        f"on batches of a multiple of {among} examples, the last one too (another batch_size, fewer examples, or "
        "drop_remainder=True where the data set makes batches), of which each worker has as many for each of its "
        "replicas; or write the loss as arithmetic on means and sums over the batch; or, where it compares examples, "
        "let it see those of all replicas: tf.distribute.get_replica_context().all_gather(rows, axis=0); or train with "
        "one replica."
    )


def rows_of(value: Any, axis: int, share: Share) -> np.ndarray:
    """A worker's rows, of which there may be none."""
    array = np.asarray(value)
    if share.size == array.shape[axis]:
        return array
    return array[(slice(None),) * axis + (slice(share.start, share.start + share.size),)]


def take(value: Any, axis: int, share: Share) -> np.ndarray:
    """A worker's rows; where it has none, one row that does not count."""
    array = np.asarray(value)
    one = Share(min(share.start, max(array.shape[axis] - 1, 0)), 1)
    return rows_of(array, axis, share if share.size else one)


def with_a_row(value: Any, axis: int) -> np.ndarray:
    """An array with a row of zeros where it has none, for ops that do not bear empty batches."""
    array = np.asarray(value)
    if array.shape[axis]:
        return array
    shape = list(array.shape)
    shape[axis] = 1
    return np.zeros(shape, array.dtype)


def length_of(value: Any) -> int | None:
    """How many rows a tensor or array has, sparse and ragged ones too; None of what has none."""
    if isinstance(value, tf.SparseTensor):
        return int(value.dense_shape[0])
    if isinstance(value, tf.RaggedTensor):
        return int(value.nrows())
    return int(np.shape(value)[0]) if np.ndim(value) else None


def slice_rows(value: Any, share: Share) -> Any:
    """Some rows of a tensor or array, sparse and ragged ones too."""
    if isinstance(value, tf.SparseTensor):
        others = value.dense_shape.numpy().tolist()[1:]
        return tf.sparse.slice(value, [share.start, *(0 for _ in others)], [share.size, *others])
    return value[share.start : share.start + share.size]
