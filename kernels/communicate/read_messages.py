"""Messages of remote reads: the owner of a variable reads it, in its own step, for the replicas of another worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import tensorflow as tf

from autodist.graph.control_flow import find_inside
from autodist.graph.names import node_of, tensor
from autodist.graph.op_types import is_in_batches
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.remote_reads import Access, ReadGroup
from autodist.kernels.context import Context
from autodist.kernels.place.copies import add_copy, take_copy
from autodist.placement.group import Group


class ReadMessages:
    """The messages of one group of reads between the owner of the variables and one reader.

    The reader sends the indices of the rows that it needs, and receives the rows. A whole value needs no request. A
    node that takes the handle itself (a loop) gets the handle of a copy, which is refreshed once per step.

        gather(v, i) → f       becomes, at the reader,    i → send,  receive → f
                                        at the owner,     receive → gather(v) → send

    Args:
        step: the step.
        editor: the editor of its graph.
        context: the owner or the reader.
        group: the group.
        reader: the worker that needs the values.
    """

    def __init__(
        self, step: ReplicatedStep, editor: StepEditor[ReplicatedStep], context: Context, group: ReadGroup, reader: int
    ) -> None:
        self._step, self._editor, self._context = step, editor, context
        self._owner, self._reader = group.owner, reader
        self._accesses = group.of(reader)

    def answer(self, writes: Mapping[str, Sequence[str]], position: Mapping[str, int]) -> None:
        """Reads the variables between two of their `writes` (by handle, in execution order), and sends the values."""
        reads: list[tuple[Sequence[str], tf.Tensor]] = []
        with self._exchange() as (f, exchange):
            requested = [tf.TensorSpec([None], dtype) for _, dtype in self._nodes if dtype is not None]
            indices = iter(exchange.receive(self._reader, "indices", requested) if requested else ())
            for (handle, dtype), nodes in self._nodes.items():
                early = [write for write in writes.get(handle, ()) if position[write] < position[nodes[0]]]
                value = self._read(f, nodes[0], handle, early, None if dtype is None else next(indices))
                reads.append((writes.get(handle, ())[len(early) :], value))
            exchange.send(self._reader, "values", [value for _, value in reads])
        self._editor.run(exchange.effects)
        for late, value in reads:
            for write in late:
                self._editor.add_control(write, [node_of(f.name(value))])

    def request(self) -> None:
        """Sends the indices of the needed rows, and replaces the reads and the taken handles."""
        replaced: dict[str, str] = {}
        copied: list[tuple[str, str, list[str]]] = []
        with self._exchange() as (f, exchange):
            indices = {
                (handle, dtype): self._indices(f, nodes, dtype)
                for (handle, dtype), nodes in self._nodes.items() if dtype is not None
            }  # fmt: skip
            if indices:
                exchange.send(self._owner, "indices", [_joined(each) for each in indices.values()])
            received = exchange.receive(self._owner, "values", [self._spec(*key) for key in self._nodes])
            for (key, nodes), value in zip(self._nodes.items(), received, strict=True):
                local = self._local(nodes)
                if key in indices:
                    replaced.update(zip(local, map(f.name, _split(value, indices[key])), strict=True))
                    continue
                reads = [node for node in local if self._editor[node].op == "ReadVariableOp"]
                replaced.update(dict.fromkeys(reads, f.name(value)))
                if takers := [node for node in local if node not in reads]:
                    copied.append((key[0], f.name(tf.identity(value).op), takers))
        self._editor.run(exchange.effects)
        for node, value in replaced.items():
            self._editor.rewire(tensor(node), value)
            self._editor.replace_control(node, [node_of(value)])
        self._editor.remove(replaced)
        self._editor.drop_lost_colocation()
        for handle, value, takers in copied:
            take_copy(self._editor, takers, [tensor(handle)], self._add_copy(handle), value)

    # -- both sides ------------------------------------------------------------------------------------------------

    @cached_property
    def _nodes(self) -> Mapping[tuple[str, tf.DType | None], list[str]]:
        """The captured nodes, by handle and dtype of the indices; those without indices need the whole value."""
        inside = set(find_inside(self._step.graph_index))
        found: dict[tuple[str, tf.DType | None], list[str]] = {}
        for name, handle in self._accesses:
            node = self._editor[name]
            has_rows = node.op == "ResourceGather" and not is_in_batches(node) and name not in inside
            found.setdefault((handle, tf.as_dtype(node.attr["Tindices"].type) if has_rows else None), []).append(name)
        return found

    @contextmanager
    def _exchange(self) -> Iterator[tuple[SubgraphBuilder, Communicator]]:
        key = f"remote_reads/{digest(';'.join(map(self._describe, self._accesses)))}"
        with (
            self._editor.subgraph(f"{key}/{self._reader}") as f,
            tf.device(self._context.cpu(self._context.worker)),
        ):
            yield f, Communicator(f, self._context, key, Group.of_workers([self._reader, self._owner]))

    def _describe(self, access: Access) -> str:
        """Returns a text that differs between accesses whose messages have other dtypes or shapes."""
        variable = self._step.by_handle[access.handle]
        return f"{access.node} {self._editor[access.node].op} {variable.name} {variable.dtype.name} {variable.shape}"

    # -- the owner -------------------------------------------------------------------------------------------------

    def _read(
        self, f: SubgraphBuilder, name: str, handle: str, after: Sequence[str], indices: tf.Tensor | None
    ) -> tf.Tensor:
        dtype, resource = self._step.by_handle[handle].dtype, f.input(handle, tf.resource)
        with tf.device(self._context.home(self._owner, dtype)), tf.control_dependencies([f.after(after)]):
            if indices is not None:
                return tf.raw_ops.ResourceGather(resource=resource, indices=indices, dtype=dtype, name=name)
            value = tf.raw_ops.ReadVariableOp(resource=resource, dtype=dtype, name=name)
            value.set_shape(self._step.by_handle[handle].shape)
            return value

    # -- the reader ------------------------------------------------------------------------------------------------

    def _local(self, nodes: Sequence[str]) -> list[str]:
        """Returns the nodes of all replicas of this worker for captured nodes."""
        copies: dict[str, list[str]] = {}
        for name, (_, captured) in sorted(self._step.copies.items(), key=lambda item: item[1][0]):
            copies.setdefault(captured, []).append(name)
        return [name for node in nodes for name in copies.get(node, [node])]

    def _indices(self, f: SubgraphBuilder, nodes: Sequence[str], dtype: tf.DType) -> list[tf.Tensor]:
        names = [tensor(self._editor[node].input[1]) for node in self._local(nodes)]
        return f.inputs_like(names, [tf.TensorSpec(None, dtype)] * len(names))  # as the owner knows them

    def _spec(self, handle: str, index_dtype: tf.DType | None) -> tf.TensorSpec:
        variable = self._step.by_handle[handle]
        return tf.TensorSpec(variable.shape if index_dtype is None else [None, *variable.shape[1:]], variable.dtype)

    def _add_copy(self, handle: str) -> str:
        """Adds a copy of a variable on this worker; another one if another group has a copy of it already."""
        variable = self._step.by_handle[handle]
        name, suffix = f"autodist/copy/{self._reader}/{handle}", f"/copy_for_{self._reader}"
        while name in self._editor:
            name, suffix = f"{name}/later", f"{suffix}/later"
        return add_copy(self._editor, variable, name, suffix, self._context.home(self._reader, variable.dtype))


def _joined(indices: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = [tf.reshape(each, [-1]) for each in indices]
    return tf.concat(flat, 0) if len(flat) > 1 else flat[0]


def _split(rows: tf.Tensor, indices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the rows for each tensor of indices, in its shape."""
    parts = tf.split(rows, [tf.size(each) for each in indices]) if len(indices) > 1 else [rows]
    return [
        tf.reshape(part, tf.concat([tf.shape(each), rows.shape[1:]], 0))
        for part, each in zip(parts, indices, strict=True)
    ]
