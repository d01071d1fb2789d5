"""Pieces: where each variable's value lies in the run, to write it there and read it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from autodist.runtime.host import Host
from autodist.runtime.messages import Messages
from autodist.runtime.variables import Tracked


def _sole_holder(tracked: Tracked) -> int | None:
    """The worker that holds a variable alone; None: every worker does."""
    return tracked.owner if tracked.owner is not None and tracked.owner >= 0 else None


GROUP_BYTES = 16 << 20
"""Values are sent in groups of about this size: what is under way takes memory twice more."""


def _in_groups(variables: Sequence[Tracked]) -> Iterator[list[Tracked]]:
    group: list[Tracked] = []
    size = 0
    for tracked in variables:
        group.append(tracked)
        size += tracked.byte_size
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class Pieces:
    """Moves values between the script's variables and the session's, on all workers.

    Args:
        host: where it runs.
        messages: by which the chief tells the others that values have arrived.
        worker: index of this worker.
        workers: how many there are.
        home: the device on which a worker keeps a variable of a dtype.
    """

    def __init__(
        self, host: Host, messages: Messages, worker: int, workers: int, home: Callable[[int, tf.DType], str]
    ) -> None:
        self._host, self._messages = host, messages
        self._worker, self._workers, self._home = worker, workers, home
        self._reads: dict[str, tf.Tensor] = {}
        self._writes: dict[str, tuple[tf.Tensor, list[tf.Operation]]] = {}

    def push(self, variables: Sequence[Tracked]) -> None:
        """Gives every piece of the variables the value that the chief's script has; all workers call it alike."""
        if not variables:
            return
        self._messages.meet()
        if self._worker == 0:
            for some in _in_groups(variables):
                made = [self._write(t) for t in some]
                values = {given: t.read().numpy() for t, (given, _) in zip(some, made, strict=True)}
                self._host.session.run([op for _, ops in made for op in ops], values)
        self._messages.exchange(b"pushed")
        for tracked in variables:
            tracked.is_ahead = False
            tracked.is_behind = self._worker != 0

    def pull(self, variables: Sequence[Tracked]) -> None:
        """Gives the script's objects the values that the session has."""
        if not variables:
            return
        for tracked, value in zip(variables, self._host.session.run([self._read(t) for t in variables]), strict=True):
            tracked.write(value)
            tracked.is_behind = False

    def _place(self, tracked: Tracked, worker: int) -> str:
        return self._home(worker, tracked.source.dtype.base_dtype)

    def _handle(self, tracked: Tracked, worker: int) -> tf.Tensor:
        with tf.device(self._place(tracked, worker)):
            return tf.raw_ops.VarHandleOp(
                dtype=tracked.source.dtype.base_dtype, shape=tracked.source.shape, shared_name=tracked.shared_name
            )

    def _read(self, tracked: Tracked) -> tf.Tensor:
        if tracked.shared_name not in self._reads:
            holder = _sole_holder(tracked)
            worker = self._worker if holder is None else holder
            with self._host.graph.as_default(), tf.device(self._place(tracked, worker)):
                self._reads[tracked.shared_name] = tf.raw_ops.ReadVariableOp(
                    resource=self._handle(tracked, worker), dtype=tracked.source.dtype.base_dtype
                )
        return self._reads[tracked.shared_name]

    def _write(self, tracked: Tracked) -> tuple[tf.Tensor, list[tf.Operation]]:
        if tracked.shared_name not in self._writes:
            holder = _sole_holder(tracked)
            holders = range(self._workers) if holder is None else [holder]
            source = tracked.source
            with self._host.graph.as_default():
                given = tf.compat.v1.placeholder(source.dtype.base_dtype, source.shape)
                made = []
                for worker in holders:
                    with tf.device(self._place(tracked, worker)):
                        made.append(tf.raw_ops.AssignVariableOp(resource=self._handle(tracked, worker), value=given))
            self._writes[tracked.shared_name] = (given, made)
        return self._writes[tracked.shared_name]
