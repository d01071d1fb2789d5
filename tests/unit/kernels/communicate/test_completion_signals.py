"""Completion signals: the order in which owners signal the end of their writes."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.execution_order import find_execution_order
from autodist.graph.index import GraphIndex
from autodist.kernels.communicate.completion_signals import rank_writes


def ranks(build, owners, awaited=None):
    """The ranks of the assignments that `build` makes, by name."""
    with tf.Graph().as_default() as graph:
        handles = {name: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], name=name) for name in owners}
        build(
            lambda name, label: tf.raw_ops.AssignVariableOp(resource=handles[name], value=tf.constant(1.0), name=label)
        )
    order = find_execution_order(GraphIndex(graph.as_graph_def()), (), {})
    assert order is not None
    return rank_writes(order, owners, awaited or {})


def test_writes_that_wait_for_no_other_owner_share_a_token():
    def build(assign):
        with tf.control_dependencies([assign("a", "first")]):
            assign("a", "second")
        assign("b", "other")

    assert ranks(build, {"a": 0, "b": 1}) == {"first": 0, "second": 0, "other": 0}


def test_averages_after_all_updates_have_a_token_of_their_own():
    # With one signal per owner, each would wait for the other's averages before it signals its update.
    def build(assign):
        with tf.control_dependencies([assign("a", "update_a"), assign("b", "update_b")]):
            trained = tf.no_op()
        with tf.control_dependencies([trained]):
            assign("a", "average_a"), assign("b", "average_b")

    assert ranks(build, {"a": 0, "b": 1}) == {"update_a": 0, "update_b": 0, "average_a": 1, "average_b": 1}


def test_a_write_that_waits_for_what_others_do_after_another_has_a_token_of_its_own():
    # With one signal, the others would wait for the second write before the work that it depends on.
    def build(assign):
        with tf.control_dependencies([assign("a", "moved")]):
            read = tf.no_op("read")
        with tf.control_dependencies([read]):
            assign("a", "moved_back")

    assert ranks(build, {"a": 0}, {"moved_back": ["read"]}) == {"moved": 0, "moved_back": 1}
