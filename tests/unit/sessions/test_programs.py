"""The comparison of a session's graph between workers, before its plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.errors import CaptureMismatchError
from autodist.runs.fingerprint import Fingerprint, require_equal
from autodist.sessions.programs import _without_records

v1 = tf.compat.v1


def compared(is_chief: bool, reduce: Callable[..., tf.Tensor] = tf.reduce_mean) -> Fingerprint:
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float32, [None, 3])
        weight = v1.get_variable("weight", [3, 1], use_resource=True)
        mean = v1.get_variable("mean", [], trainable=False, use_resource=True)
        loss = tf.reduce_mean(x @ weight)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        mean.assign(0.9 * mean + 0.1 * loss, name="averaged")
        error = reduce(tf.abs(x), name="error")
        if is_chief:
            v1.summary.scalar("loss", loss)
            v1.summary.scalar("error", error)
            v1.summary.merge_all()
            v1.train.Saver()
    return Fingerprint.of(_without_records(CapturedGraph.of(graph, notes.calls).whole()))


def test_the_chief_alone_may_have_summaries_and_savers() -> None:
    chief, other = compared(is_chief=True), compared(is_chief=False)
    require_equal(chief, other, "worker 1")
    assert chief == other
    names = {name for name, *_ in other.nodes}
    assert {"averaged", "GradientDescent/update_weight/ResourceApplyGradientDescent", "weight"} <= names


def test_other_tensors_that_a_run_may_fetch_are_compared() -> None:
    with pytest.raises(CaptureMismatchError, match="error = Sum"):
        require_equal(compared(is_chief=True), compared(is_chief=False, reduce=tf.reduce_sum), "worker 1")
