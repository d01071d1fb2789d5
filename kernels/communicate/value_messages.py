"""ValueMessages: an owner's messages with the values that it has written, for the cached copies of other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import tensorflow as tf

from autodist.compressors.values import ValueCode
from autodist.graph.editor import GraphEditor
from autodist.graph.parts import Variable
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.communicate.buckets import PACK_BYTES, key_of_tensors, sent_order
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.completion_signals import WriteGroup
from autodist.kernels.communicate.read_cached_copies import copy_of
from autodist.kernels.context import Context
from autodist.kernels.plan import CACHED_COPY
from autodist.placement.holder import Copy


class ValueMessages:
    """Sends the values that a group of writes has written, and refreshes cached copies with them.

    The last message of a group is the completion signal of its writes; it may have no values.

    Args:
        step: the step, with its execution order.
        context: the worker for which it is rewritten.
        editor: the editor of the step.
        owner: the owner of each owned variable, by handle.
        performed: maps a write of the step to the node of the background program that performs it; None if the step
            itself performs it. A step refreshes a copy once its replicas have read it.
    """

    def __init__(
        self,
        step: ReplicatedStep,
        context: Context,
        editor: GraphEditor,
        owner: Mapping[str, int],
        performed: Callable[[str], str] | None = None,
    ) -> None:
        self._step, self._context, self._editor, self._owner = step, context, editor, owner
        self._performed = performed
        assert step.order is not None, "set by SetSyncMode"
        self._writes_of = step.order.writes_of(owner)
        self._sent_at = {pending.variable: k for k, pending in enumerate(sent_order(step.reductions))}

    def send(self, f: SubgraphBuilder, exchange: Communicator, group: WriteGroup) -> list[str]:
        """Sends the written values to the workers that have cached copies, and the signal that all are written.

        Returns:
            The nodes that refresh this worker's own copies.
        """
        refreshed: list[str] = []
        *early, last = self._messages(group)
        for variables in early:
            writes = [write for v in variables for write in self._writes_of[v.handle]]
            refreshed += self._send_message(f, exchange, variables, self._nodes(writes))
        writes = self._nodes(group.writes)
        refreshed += self._send_message(f, exchange, last, writes)
        exchange.broadcast("done", [tf.constant(True)], group.readers.receivers, writes)
        return refreshed

    def receive(self, f: SubgraphBuilder, exchange: Communicator, group: WriteGroup) -> list[str]:
        """Receives the written values and the signal; returns the nodes that refresh this worker's copies."""
        refreshed: list[str] = []
        for variables in self._messages(group) if self._context.computes else [[]]:
            refreshed += self._receive_message(f, exchange, group.owner, variables)
        return refreshed

    def _nodes(self, writes: Iterable[str]) -> list[str]:
        return list(writes) if self._performed is None else [self._performed(write) for write in writes]

    def _send_message(
        self, f: SubgraphBuilder, exchange: Communicator, variables: Sequence[Variable], writes: Sequence[str]
    ) -> list[str]:
        """Sends the values of some variables after `writes`, a signal without any; refreshes this worker's copies."""
        values = []
        with tf.control_dependencies([f.after(writes)]):
            for variable in variables:
                with tf.device(self._context.home(self._context.worker, variable.dtype)):
                    handle = f.input(variable.handle, tf.resource)
                    values.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype))
                    values[-1].set_shape(variable.shape)
        after = () if variables else writes
        codes = list(map(self._code, variables))
        sent = [code.encode(value) for code, value in zip(codes, values, strict=True)]
        content = [t for tensors in sent for t in tensors]
        exchange.broadcast(self._tag(variables), content or [tf.constant(True)], exchange.group.workers, after)
        return [
            self._refresh(f, variable, code.decode(tensors))
            for variable, code, tensors in zip(variables, codes, sent, strict=True)
            if copy_of(variable.handle) in self._editor
        ]

    def _receive_message(
        self, f: SubgraphBuilder, exchange: Communicator, owner: int, variables: Sequence[Variable]
    ) -> list[str]:
        if not variables:
            exchange.receive(owner, self._tag(variables), [tf.constant(True)])
            return []
        codes = list(map(self._code, variables))
        specs = [code.specs() for code in codes]
        came = iter(exchange.receive(owner, self._tag(variables), [spec for some in specs for spec in some]))
        sent = [list(islice(came, len(some))) for some in specs]
        return [
            self._refresh(f, variable, code.decode(tensors))
            for variable, code, tensors in zip(variables, codes, sent, strict=True)
        ]

    def _refresh(self, f: SubgraphBuilder, variable: Variable, value: tf.Tensor) -> str:
        """Assigns a value to the cached copy of its variable."""
        copy = copy_of(variable.handle)
        readers = sorted(self._editor.consumers(copy)) if self._performed is None else []
        with (
            tf.device(self._context.home(self._context.worker, variable.dtype)),
            tf.control_dependencies([f.after(readers)]),
        ):
            made = tf.raw_ops.AssignVariableOp(resource=f.input(copy, tf.resource), value=value, name="refresh")
        return f.name(made)

    def _messages(self, group: WriteGroup) -> list[list[Variable]]:
        """Returns the variables whose values are sent for a group of writes, by message; the last may have none.

        Small values share messages of up to `PACK_BYTES`. A variable's value is sent after its last write. The messages
        are in the order in which gradients are sent to the owner, so the first values are on their way while the owner
        still receives gradients; the last message waits for the last gradient anyway.
        """
        last = set(group.writes)
        variables = [
            self._step.by_handle[handle] for handle, writes in self._writes_of.items()
            if writes[-1] in last and self._copy(self._step.by_handle[handle]) is not None
        ]  # fmt: skip
        variables.sort(key=lambda v: self._sent_at.get(v.name, len(self._sent_at)))
        messages: list[list[Variable]] = []
        free = 0
        for variable in variables:
            size = sum(spec.shape.num_elements() * spec.dtype.size for spec in self._code(variable).specs())
            if size > free or not messages:
                messages.append([])
                free = PACK_BYTES
            messages[-1].append(variable)
            free -= size
        return messages or [[]]

    def _copy(self, variable: Variable) -> Copy | None:
        return self._step.slices[variable.name].copy(CACHED_COPY)

    def _code(self, variable: Variable) -> ValueCode:
        return ValueCode.of(self._encoding(variable), variable.shape, variable.dtype)

    def _encoding(self, variable: Variable) -> str:
        copy = self._copy(variable)
        return "" if copy is None else copy.encoding

    def _tag(self, variables: Sequence[Variable]) -> str:
        """Returns the tag of a message with the values of some variables, the same in all programs that send them."""
        if not variables:
            return "done"
        names = [variable.name + self._encoding(variable) for variable in variables]
        specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        return f"values/{key_of_tensors(names, specs)}"
