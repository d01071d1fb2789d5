"""The queues of a step: those of other workers' messages, and their names."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.inboxes import SOURCE, inboxes_of, name_by_type


def test_a_name_with_types_makes_no_inbox_of_an_outbox():
    with tf.Graph().as_default() as graph:
        tf.queue.FIFOQueue(2, [tf.float64], shared_name="reshard/part/0/1")
        inbox = tf.queue.FIFOQueue(2, [tf.float64], shared_name="reshard/part/1/0")
        tf.queue.FIFOQueue(2, [tf.int32], [[3]], shared_name="other/part/0/1")
    graph_def = graph.as_graph_def()
    next(node for node in graph_def.node if node.name == inbox.queue_ref.op.name).attr[SOURCE].i = 1
    named = name_by_type(graph_def, "reshard/")
    names = [node.attr["shared_name"].s.decode() for node in named.node]
    assert names == ["reshard/part/float64/0/1", "reshard/part/float64/1/0", "other/part/0/1"]
    assert {name: one.source for name, one in inboxes_of(named).items()} == {"reshard/part/float64/1/0": 1}
