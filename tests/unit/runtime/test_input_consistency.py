"""Input consistency check: the chief detects workers with other data than expected, for any order of messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.runtime.dataset import DistributedDataset
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.input_consistency import (
    HASHED_BYTES,
    FedInput,
    FeedRole,
    FirstBatch,
    InputConsistencyCheck,
    digest_of,
    find_faults,
)
from autodist.runtime.messages import Messages

NAMES = ("a:0", "a:1", "b:0")
X = np.arange(12.0).reshape(4, 3)


def batch(worker: int, *arrays: tuple[str, Any, FeedRole]) -> FirstBatch:
    return FirstBatch(worker, "step 1", tuple(FedInput(name, role, digest_of(a)) for name, a, role in arrays))


def kinds(*batches: FirstBatch) -> set[str]:
    return set(find_faults(batches, NAMES))


@pytest.mark.parametrize("role", [FeedRole.GLOBAL, FeedRole.WHOLE])
def test_equal_inputs_pass(role: FeedRole):
    assert kinds(*(batch(w, ("x", X, role)) for w in range(3))) == set()


@pytest.mark.parametrize("role", [FeedRole.GLOBAL, FeedRole.WHOLE])
def test_the_differing_worker_and_input_are_reported_with_the_fix(role: FeedRole):
    batches = [batch(w, ("x", X + (w == 2), role), ("y", X, role), ("z", X + w, role)) for w in range(3)]
    (told,) = find_faults(batches, NAMES).values()
    assert "x of b:0, z of a:1 and b:0 differs from that of a:0" in told
    assert ("np.random.default_rng(1)" if role == FeedRole.GLOBAL else "Pass the same value on every worker") in told


def test_own_examples_that_differ_pass():
    assert kinds(*(batch(w, ("x", X + w, FeedRole.OWN)) for w in range(3))) == set()


def test_workers_that_feed_the_same_examples_are_told():
    batches = [batch(w, ("x", X * min(w, 1), FeedRole.OWN)) for w in range(3)]
    told = find_faults(batches, NAMES)["own"]
    assert told.startswith("a:1 and b:0 feed the same examples") and "ad.worker_index" in told


def test_labels_may_be_alike_where_the_examples_differ():
    assert kinds(*(batch(w, ("x", X + w, FeedRole.OWN), ("y", X[0], FeedRole.OWN)) for w in range(3))) == set()


@pytest.mark.parametrize(
    "other", [X.astype(np.float32), X.reshape(3, 4), X + 1e-9, np.array(["a", "b"], object), np.array(["a", "b"])]
)
def test_the_digest_tells_arrays_apart(other: np.ndarray):
    assert digest_of(other) != digest_of(X)


@pytest.mark.parametrize("value", [X, X[:, ::2], 1.5, "text", np.array([b"a", "b"], object), np.zeros((0, 3)), True])
def test_the_digest_of_a_copy_is_the_same(value: Any):
    assert digest_of(value) == digest_of(np.array(value))


def test_of_a_tensor_the_values_count():
    assert digest_of(tf.constant(X)) == digest_of(X)
    assert digest_of(tf.constant(X, tf.bfloat16)) != digest_of(X)


@pytest.mark.parametrize("at", [0, -1])
def test_both_ends_of_a_large_array_are_looked_at(at: int):
    large = np.zeros(HASHED_BYTES + 4321, np.uint8)
    before = digest_of(large)
    large[at] = 1
    assert digest_of(large) != before


def test_a_message_is_read_as_it_was_sent():
    one = batch(2, ("x", X, FeedRole.OWN), ("k", 1.5, FeedRole.WHOLE))
    assert FirstBatch.decode(one.encode()) == one


class Wire:
    """Simulates the messages: each waits until the chief reads it."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.is_there = True

    def post(self, content: bytes) -> None:
        self.waiting.append(content)

    def posted(self) -> list[bytes]:
        found, self.waiting = self.waiting, []
        return found


def workers(wire: Wire, with_replicas: Sequence[int] = (0, 1, 2)) -> list[InputConsistencyCheck]:
    def guard(call: Any, *arguments: Any) -> Any:
        return call(*arguments)

    return [
        InputConsistencyCheck(w, NAMES, frozenset(with_replicas), lambda: wire if wire.is_there else None, guard)  # type: ignore[arg-type, return-value]
        for w in range(3)
    ]


def test_the_chief_warns_once_when_all_have_told(caplog: pytest.LogCaptureFixture):
    wire = Wire()
    chief, *others = workers(wire)
    with caplog.at_level(logging.WARNING, "autodist"):
        for _ in range(2):
            chief.record("step", [("x", X, FeedRole.GLOBAL)])
            for k, other in enumerate(others):
                chief.report_faults()
                assert len(caplog.messages) <= 1
                other.record("step", [("x", X + k, FeedRole.GLOBAL)])
                other.send()
            chief.report_faults()
    assert len(caplog.messages) == 1 and "x of b:0 differs" in caplog.messages[0]


def test_a_worker_that_is_a_step_ahead_is_compared_step_by_step(caplog: pytest.LogCaptureFixture):
    wire = Wire()
    chief, *others = workers(wire)
    for number in range(2):
        for other in reversed(others):
            other.record("step", [("x", X + number, FeedRole.GLOBAL)])
            other.send()
    for number in range(2):
        chief.record("step", [("x", X + number, FeedRole.GLOBAL)])
        chief.report_faults()
    assert not caplog.messages


def test_a_worker_without_replicas_is_not_waited_for(caplog: pytest.LogCaptureFixture):
    wire = Wire()
    chief, server, other = workers(wire, (0, 2))
    for one in (chief, server, other):
        one.record("step", [("x", X, FeedRole.OWN)])
        one.send()
    chief.report_faults()
    assert len(caplog.messages) == 1 and "a:0 and b:0 feed the same" in caplog.messages[0]


def test_parts_without_examples_are_not_the_same_examples(caplog: pytest.LogCaptureFixture):
    wire = Wire()
    for one in (everyone := workers(wire)):
        one.record("step", [("x", X[:0], FeedRole.OWN)])
        one.send()
    everyone[0].report_faults()
    assert not caplog.messages


def test_the_first_batch_of_a_data_set_is_sent_when_the_workers_have_joined(caplog: pytest.LogCaptureFixture):
    wire = Wire()
    wire.is_there = False
    everyone = workers(wire)
    for worker, one in enumerate(everyone):
        data = DistributedDataset([(X + worker, X)] * 3, [0, 1, 2], worker, one.record_data_set)
        assert len(list(data)) == 3
        one.send()
    everyone[0].report_faults()
    wire.is_there = True
    for one in everyone:
        one.send()
    everyone[0].report_faults()
    assert len(caplog.messages) == 1 and "array 0 of the data set of a:1 and b:0 differs" in caplog.messages[0]


def test_the_chief_reads_what_was_posted_by_then():
    graph_runner = GraphRunner("", tf.compat.v1.ConfigProto())
    messages = Messages(graph_runner, None, 0, 1)
    assert messages.posted() == []
    for number in range(100):  # more than any other queue holds
        messages.post(b"%d" % number)
    assert messages.posted() == [b"%d" % number for number in range(100)]
    assert messages.posted() == []
    graph_runner.close()
