"""Queues of messages, for tests that run without a rewritten step."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.inboxes import Inbox


def queue_of(inbox: Inbox, device: str | tf.DeviceSpec) -> tf.queue.FIFOQueue:
    """Returns an inbox or, on a device of its source, the outbox."""
    with tf.device(device):
        return tf.queue.FIFOQueue(inbox.capacity, inbox.dtypes, inbox.shapes, shared_name=inbox.name)
