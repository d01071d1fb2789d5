"""The tensors that a rewritten step sends to other workers, counted from its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import tensorflow as tf

from autodist.graph.names import node_of
from autodist.graph.step import Step


def sent_bytes(step: Step) -> Mapping[str, int]:
    """Returns the bytes that a worker enqueues at other workers in one step, by purpose.

    Args:
        step: its queues all have tensors of fixed shapes.
    """
    queues = {n.name: n for n in step.graph_def.node if n.op == "FIFOQueueV2"}
    sent: Counter[str] = Counter()
    for node in step.graph_def.node:
        if node.op == "QueueEnqueueV2":
            queue = queues[node_of(node.input[0])]
            _, what, _, _ = queue.attr["shared_name"].s.decode().rsplit("/", 3)
            sent[what] += _bytes_of(queue)
    return sent


def _bytes_of(queue: tf.compat.v1.NodeDef) -> int:
    shapes = [tf.TensorShape(s) for s in queue.attr["shapes"].list.shape]
    types = [tf.as_dtype(t) for t in queue.attr["component_types"].list.type]
    assert len(shapes) == len(types), f"{queue.name} has no fixed shapes"
    return sum(s.num_elements() * t.size for s, t in zip(shapes, types, strict=True))
