"""Steps of many workers in one session, and the messages that they exchange there."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.inboxes import SOURCE, inboxes_of, queue_of
from autodist.graph.names import node_of
from autodist.graph.step import Step
from autodist.graph.walks import reach

TRANSFER = "transfer"
"""Name scope of the nodes that move a message to an inbox."""


def task_of_device(device: str) -> int:
    task = tf.DeviceSpec.from_string(device).task
    assert task is not None, f"{device!r} names no worker"
    return task


def transfers_of(step: Step, outer: str = "") -> list[str]:
    """The nodes that move one message to each inbox of a step, or of one of its outer steps, in one session."""
    apart = {key: reach(one.nodes, step.graph_index.sources.__getitem__) for key, one in step.outer_steps.items()}
    queues = {node.attr["shared_name"].s.decode(): node.name for node in step.graph_def.node if SOURCE in node.attr}
    used_by = {name: next((key for key, nodes in apart.items() if node in nodes), "") for name, node in queues.items()}
    return [f"{TRANSFER}/{k}/put" for k, name in enumerate(inboxes_of(step.graph_def)) if used_by[name] == outer]


def readers_of(step: Step) -> dict[str, int]:
    """The worker that the message of each enqueue goes to; for outboxes, whose names end with it."""
    nodes = {node.name: node for node in step.graph_def.node}
    queues = {node.name: nodes[node_of(node.input[0])] for node in nodes.values() if node.op == "QueueEnqueueV2"}
    shared = {name: queue.attr["shared_name"].s.decode() for name, queue in queues.items()}
    return {name: int(one.rpartition("/")[2]) for name, one in shared.items()}


def partners_of(step: Step) -> set[int]:
    """The workers that a worker sends to or receives from."""
    return {*readers_of(step).values(), *(inbox.source for inbox in inboxes_of(step.graph_def).values())}


def workers_of(step: Step) -> set[int]:
    """The workers on which the nodes of a step and of its background program are placed."""
    editor = GraphEditor(step.graph_def)
    needed = editor.ancestors([*map(node_of, step.outputs), *step.targets, *step.background_nodes])
    return {task_of_device(editor[name].device) for name in needed if editor[name].device}


def in_one_session(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """A worker's step for a session without devices, with the nodes of `transfers_of`."""
    out = tf.compat.v1.GraphDef()
    out.CopyFrom(graph_def)
    queues = {node.attr["shared_name"].s.decode(): node for node in graph_def.node if SOURCE in node.attr}
    for k, (name, inbox) in enumerate(inboxes_of(graph_def).items()):
        with tf.Graph().as_default() as graph, tf.name_scope(f"{TRANSFER}/{k}"):
            device = queues[name].device
            own = queue_of(inbox, device)
            message = queue_of(inbox, tf.DeviceSpec.from_string(device).replace(task=inbox.source)).dequeue()
            own.enqueue(message, name="put")
        out.node.extend(graph.as_graph_def().node)
    for node in out.node:
        if "shared_name" in node.attr and node.attr["shared_name"].s:
            node.attr["shared_name"].s = b"worker_%d/%s" % (task_of_device(node.device), node.attr["shared_name"].s)
        node.device = ""
    return out
