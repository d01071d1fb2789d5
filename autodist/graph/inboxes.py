"""Inboxes: the queues of a step that are filled with messages of other workers."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.editor import NodeDef

SOURCE = "_source"
"""Attribute of an inbox's queue: the worker whose outbox, a queue of the same name there, the messages come from."""


@dataclass(frozen=True)
class Inbox:
    """A queue of this worker for the messages of one other worker under one tag.

    Attributes:
        name: the shared name of the inbox on the reader, and of the outbox on the source.
        source: the worker that sends.
        dtypes: of a message's tensors.
        shapes: of these tensors; None if they are not all known.
        capacity: of each of both queues.
    """

    name: str
    source: int
    dtypes: tuple[tf.DType, ...]
    shapes: tuple[tf.TensorShape, ...] | None
    capacity: int

    @classmethod
    def of(cls, node: NodeDef) -> Inbox:
        """Returns the inbox of a queue's node, which has the attribute `SOURCE`."""
        dtypes, shapes = _types_of(node)
        return cls(
            node.attr["shared_name"].s.decode(), node.attr[SOURCE].i, dtypes, shapes or None, node.attr["capacity"].i
        )

    @property
    def byte_size(self) -> int | None:
        """Bytes of a message; None if they are not known."""
        if self.shapes is None or any(not shape.is_fully_defined() for shape in self.shapes):
            return None
        if tf.string in self.dtypes:
            return None
        return sum(
            int(shape.num_elements()) * dtype.size for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def describe(self, node: NodeDef) -> None:
        """Makes a queue's node the inbox or, on the source's device, the outbox."""
        node.attr["shared_name"].s = self.name.encode()
        node.attr["capacity"].i = self.capacity
        if self.shapes is not None:
            node.attr["shapes"].list.shape.extend(shape.as_proto() for shape in self.shapes)


def _types_of(node: NodeDef) -> tuple[tuple[tf.DType, ...], tuple[tf.TensorShape, ...]]:
    """Returns the dtypes and shapes of a queue's components; no shapes if they are not all known."""
    dtypes = tuple(tf.as_dtype(kind) for kind in node.attr["component_types"].list.type)
    return dtypes, tuple(tf.TensorShape(shape) for shape in node.attr["shapes"].list.shape)


def inboxes_of(graph_def: tf.compat.v1.GraphDef) -> dict[str, Inbox]:
    """Returns the inboxes of a step, by name."""
    found = (Inbox.of(node) for node in graph_def.node if node.op == "FIFOQueueV2" and SOURCE in node.attr)
    return {inbox.name: inbox for inbox in found}


def name_by_type(graph_def: tf.compat.v1.GraphDef, prefix: str) -> tf.compat.v1.GraphDef:
    """Returns the graph with the types of messages in the names of queues that start with a prefix.

    All steps share queues by name, and steps may number transfers of different types alike.
    """
    named = tf.compat.v1.GraphDef()
    named.CopyFrom(graph_def)
    for node in named.node:
        name = node.attr["shared_name"].s.decode() if node.op == "FIFOQueueV2" else ""
        if name.startswith(prefix):
            tag, source, to = name.rsplit("/", 2)
            # Not `Inbox.of`: to read the source of an outbox would add the attribute, and make it an inbox.
            dtypes, shapes = _types_of(node)
            types = "_".join(one.name for one in dtypes) + "_".join(map(str, shapes))
            node.attr["shared_name"].s = f"{tag}/{types}/{source}/{to}".encode()
    return named


def queue_of(inbox: Inbox, device: str | tf.DeviceSpec) -> tf.queue.FIFOQueue:
    """Returns an inbox or, on a device of its source, the outbox; adds its node to the current graph."""
    with tf.device(device):
        return tf.queue.FIFOQueue(inbox.capacity, inbox.dtypes, inbox.shapes, shared_name=inbox.name)
