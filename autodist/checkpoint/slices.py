"""Reads values slice by slice: each worker what it has of a variable, and no more of it than a group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import tensorflow as tf

from autodist.checkpoint.write import place_of
from autodist.runtime.host import Host
from autodist.runtime.pieces import GROUP_BYTES, Pieces, in_groups
from autodist.runtime.variables import Kept


@dataclass(frozen=True)
class _Read:
    """A shard, or a copy of one, that a worker reads.

    Attributes:
        key: of the variable in the checkpoint.
        kept: the variable.
        place: the shard's, as TensorFlow spells it.
        byte_size: of its value.
        worker: that has it.
        handle: of what it has.
    """

    key: str
    kept: Kept
    place: str
    byte_size: int
    worker: int
    handle: tf.Tensor


def read_into_session(
    host: Host, pieces: Pieces, desk: Callable[[int], str], prefix: str, values: Iterable[tuple[str, Kept]]
) -> None:
    """On the chief, gives the session's variables what a checkpoint has, while nobody is in a step.

    Args:
        host: where it runs.
        pieces: where the values lie.
        desk: the device of a worker on which it reads files.
        prefix: of the checkpoint, as every worker sees it.
        values: the key of each in the checkpoint, and how the session has it.
    """
    by_worker: dict[int, list[_Read]] = {}
    for read in _reads(pieces, values):
        by_worker.setdefault(read.worker, []).append(read)
    groups = [list(in_groups(reads)) for reads in by_worker.values()]
    for k in range(max(map(len, groups), default=0)):
        together = [some[k] for some in groups if k < len(some)]
        host.session.run([write for group in together for write in _writes(host, pieces, desk, prefix, group)])


def _reads(pieces: Pieces, values: Iterable[tuple[str, Kept]]) -> Iterator[_Read]:
    for key, kept in values:
        for shard, worker, handle in pieces.holders(kept):
            size = kept.dtype.size * prod(shard.shape)
            yield _Read(key, kept, place_of(kept, shard), size, worker, handle)


def _writes(
    host: Host, pieces: Pieces, desk: Callable[[int], str], prefix: str, group: Sequence[_Read]
) -> Iterator[tf.Operation]:
    with host.graph.as_default():
        with tf.device(desk(group[0].worker)):
            found = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=[read.key for read in group],
                shape_and_slices=[read.place for read in group],
                dtypes=[read.kept.dtype for read in group],
            )
        for read, value in zip(group, found, strict=True):
            with pieces.on(read.kept, read.worker):
                yield tf.raw_ops.AssignVariableOp(resource=read.handle, value=value)


def read_here(variable: tf.Variable, prefix: str, key: str) -> None:
    """Gives a variable of this process what a checkpoint has, in slices along its first axis where it is large."""
    shape, dtype = variable.shape.as_list(), variable.dtype.base_dtype
    if prod(shape) * dtype.size <= GROUP_BYTES or not _has_room(variable):
        # `assign` would refuse the shape where the value was let go.
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=_restored(prefix, key, "", dtype))
        return
    rows = max(1, GROUP_BYTES // (prod(shape[1:]) * dtype.size))
    for begin in range(0, shape[0], rows):
        size = min(rows, shape[0] - begin)
        rest = "".join(f":0,{n}" for n in shape[1:])
        value = _restored(prefix, key, f"{' '.join(map(str, shape))} {begin},{size}{rest}", dtype)
        variable[begin : begin + size].assign(value)


def _has_room(variable: tf.Variable) -> bool:
    """Whether its memory holds a value of its shape; it is let go where the session has another."""
    there = tf.raw_ops.VariableShape(input=variable.handle)
    return bool(tf.raw_ops.VarIsInitializedOp(resource=variable.handle)) and there.numpy().tolist() == variable.shape


def _restored(prefix: str, key: str, place: str, dtype: tf.DType) -> tf.Tensor:
    with tf.device("/cpu:0"):
        (value,) = tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=[key], shape_and_slices=[place], dtypes=[dtype])
    return value
