"""Broadcast: values reach every worker that holds them, forwarded by others, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.devices import cpu_of
from autodist.placement.holder import Holder
from autodist.placement.partitioning import Partitioning
from autodist.runtime import batched_transfers, broadcast
from autodist.runtime.batched_transfers import Listing
from autodist.runtime.broadcast import VariableBroadcast, _assemble
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.variables import StoredVariable
from tests.unit.placement.holders import held_by
from tests.unit.runtime.servers import LIMIT, running, start_servers

WORKERS = 6

VALUES = {
    "float": np.random.default_rng(0).normal(size=(9, 7)),
    "half": np.arange(6).astype(tf.bfloat16.as_numpy_dtype),
    "scalar": np.float32(3.0),
    "flag": np.array([True, False]),
    "empty": np.zeros([0, 3], np.int64),
    "words": np.array([[b"a", b""], [b"longer than the others", b"\0"]], object),
    "counter": np.int64(2**40),
    "complex": np.array([1j, 2.0]),
}
ROWS = np.arange(54.0).reshape(6, 9)
CUTS = {
    "rows": held_by(ROWS.shape, tuple(range(6)), Partitioning(0, (1,) * 6), workers=WORKERS),
    "columns": held_by(ROWS.shape, (5, 2), Partitioning(1, (4, 5)), workers=WORKERS),
    "copies": held_by(ROWS.shape, (1, None), Partitioning(0, (2, 4)), workers=WORKERS, copies=[["/proxy"]]),
    "owned": held_by(ROWS.shape, [4], workers=WORKERS),
}


def everywhere(value: np.ndarray) -> Holder:
    return held_by(np.shape(value), workers=WORKERS)


@pytest.fixture(scope="module")
def graph_runners() -> Iterator[list[GraphRunners]]:
    """A session for each worker, on servers in this process."""
    with running(start_servers(WORKERS)) as made:
        yield made


@pytest.fixture
def workers(graph_runners: list[GraphRunners]) -> list[VariableBroadcast]:
    return [
        VariableBroadcast(one, k, WORKERS, lambda worker, dtype, device: cpu_of(worker, WORKERS))
        for k, one in enumerate(graph_runners)
    ]


def spread(workers: list[VariableBroadcast], values: dict[str, tuple[np.ndarray, Holder]], present: list[int]) -> None:
    kepts = [
        StoredVariable(name, tf.as_dtype(np.asarray(v).dtype), np.shape(v), holder)
        for name, (v, holder) in values.items()
    ]
    listing = Listing.of(kepts, present)
    arrays = [np.asarray(value) for value, _ in values.values()]
    with ThreadPoolExecutor(len(present)) as pool:
        taken = [pool.submit(workers[w].receive, Listing.decode(listing.encode())) for w in present[1:]]
        workers[0].send(listing, lambda k: arrays[k])
        for one in taken:
            one.result(LIMIT)


def value(graph_runners: list[GraphRunners], worker: int, name: str, like: np.ndarray) -> np.ndarray:
    """Returns a worker's value of a variable."""
    dtype = tf.as_dtype(np.asarray(like).dtype)
    with graph_runners[worker].control.graph.as_default(), tf.device(cpu_of(worker, WORKERS)):
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=np.shape(like), shared_name=name)
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return graph_runners[worker].control.session.run(read)


@pytest.mark.parametrize("most", [1 << 24, 64])
def test_all_get_what_all_have(
    graph_runners: list[GraphRunners], workers: list[VariableBroadcast], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_transfers, "TRANSFER_BYTES", most)
    given = {f"{name}{most}": (one, everywhere(one)) for name, one in VALUES.items()}
    spread(workers, given, list(range(WORKERS)))
    for worker in range(1, WORKERS):
        for name, (one, _) in given.items():
            np.testing.assert_array_equal(value(graph_runners, worker, name, one), one)


@pytest.mark.parametrize("most", [1 << 24, 40])
def test_owners_get_their_shards_and_all_the_copies(
    graph_runners: list[GraphRunners], workers: list[VariableBroadcast], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_transfers, "TRANSFER_BYTES", most)
    spread(workers, {f"{name}{most}": (ROWS, one) for name, one in CUTS.items()}, list(range(WORKERS)))
    for worker in range(1, WORKERS):
        row = ROWS[worker : worker + 1]
        np.testing.assert_array_equal(value(graph_runners, worker, f"rows{most}/shard_{worker}", row), row)
        for name in ("/shard_0/proxy", "/shard_1")[: 1 if worker == 0 else 2]:
            part = ROWS[:2] if "proxy" in name else ROWS[2:]
            np.testing.assert_array_equal(value(graph_runners, worker, f"copies{most}{name}", part), part)
    np.testing.assert_array_equal(value(graph_runners, 1, f"copies{most}/shard_0", ROWS[:2]), ROWS[:2])
    np.testing.assert_array_equal(value(graph_runners, 5, f"columns{most}/shard_0", ROWS[:, :4]), ROWS[:, :4])
    np.testing.assert_array_equal(value(graph_runners, 2, f"columns{most}/shard_1", ROWS[:, 4:]), ROWS[:, 4:])
    np.testing.assert_array_equal(value(graph_runners, 4, f"owned{most}", ROWS), ROWS)
    with pytest.raises(tf.errors.OpError):
        value(graph_runners, 3, f"owned{most}", ROWS)


def test_the_next_values_of_the_same_variables_find_the_graph_as_it_is(
    graph_runners: list[GraphRunners], workers: list[VariableBroadcast]
) -> None:
    for present in ([0, 1, 2, 3, 4, 5], [0, 3, 5], [0, 1, 2, 3, 4, 5]):
        before = {w: len(graph_runners[w].control.graph.get_operations()) for w in present}
        for round_ in range(3):
            spread(workers, {"again": (ROWS + round_, everywhere(ROWS))}, present)
            now = {w: len(graph_runners[w].control.graph.get_operations()) for w in present}
            assert round_ == 0 or now == before
            before = now
        for worker in present[1:]:
            np.testing.assert_array_equal(value(graph_runners, worker, "again", ROWS), ROWS + 2)


def test_a_received_value_is_in_memory_once(
    workers: list[VariableBroadcast], graph_runners: list[GraphRunners], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A variable in NumPy's memory would be replaced by its first update, and stay in memory until the step ends.
    monkeypatch.setattr(batched_transfers, "TRANSFER_BYTES", 4 << 10)
    received: list[weakref.ref[np.ndarray]] = []

    def assemble(*args: Any) -> np.ndarray | None:
        content = _assemble(*args)
        if content is not None:
            assert content.base is not None
            received.append(weakref.ref(content.base))
        return content

    monkeypatch.setattr(broadcast, "_assemble", assemble)
    large = np.arange(5000.0)
    spread(workers, {"in pieces": (large, everywhere(large))}, [0, 1])
    np.testing.assert_array_equal(value(graph_runners, 1, "in pieces", large), large)
    assert len(received) == 1 and received[0]() is None


def test_training_on_a_worker_does_not_change_values_that_another_received(
    graph_runners: list[GraphRunners], workers: list[VariableBroadcast]
) -> None:
    """Those in one process may hand on one another's memory."""
    spread(workers, {"trained": (np.ones([1000]), held_by([1000], workers=WORKERS))}, list(range(WORKERS)))
    with graph_runners[1].control.graph.as_default(), tf.device(cpu_of(1, WORKERS)):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[1000], shared_name="trained")
        add = tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.ones([1000], tf.float64))
    graph_runners[1].control.session.run(add)
    for worker in range(2, WORKERS):
        np.testing.assert_array_equal(value(graph_runners, worker, "trained", np.ones([1000])), np.ones([1000]))
