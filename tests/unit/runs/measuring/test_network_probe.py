"""Measurements of the network between servers of this process: their structure, and the error for a broken link."""

from __future__ import annotations

import datetime
import math
import socket
from collections.abc import Sequence

import pytest
import tensorflow as tf

from autodist.errors import ClusterError
from autodist.resources.measurements import NetworkMeasurement
from autodist.runs.measuring import link_probe
from autodist.runs.measuring.link_probe import TimeLimits, probing
from autodist.runs.measuring.network_probe import exchange, gathering, measure_network, measure_pair, pairs_of
from tests.unit.runtime.servers import LIMIT, start_servers


@pytest.fixture(autouse=True)
def small_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends few bytes, since these tests are not about speed."""
    monkeypatch.setattr(link_probe, "SIZES", (1 << 16, 1 << 19))


@pytest.fixture(scope="module")
def two() -> str:
    return start_servers(2)[0]


@pytest.fixture(scope="module")
def three() -> str:
    return start_servers(3)[0]


def check_numbers(measured: NetworkMeasurement) -> None:
    for pair in measured.pairs:
        assert all(0 < number < math.inf for number in (pair.round_trip, pair.there, pair.back))
    assert 0 < measured.exchanged < math.inf
    assert all(0 <= number < math.inf for number in (measured.message, measured.gathered, measured.call))
    assert datetime.datetime.fromisoformat(measured.at).tzinfo is not None


def test_two_workers_have_one_pair_and_nothing_to_gather(two: str) -> None:
    measured = measure_network(two, [0, 0])
    check_numbers(measured)
    assert [(pair.one, pair.other) for pair in measured.pairs] == [(0, 1)]
    assert measured.gathered == 0
    assert measured.call == 0


def test_three_workers_gather_and_exchange(three: str) -> None:
    measured = measure_network(three, [0, 1, 1])
    check_numbers(measured)
    assert [(pair.one, pair.other) for pair in measured.pairs] == [(0, 1), (1, 2)]
    assert measured.gathered > 0


def test_without_time_the_first_pair_of_machines_is_measured_and_all_at_once(
    three: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeLimits, "of", lambda seconds: TimeLimits(LIMIT, deadline=0.0))
    measured = measure_network(three, [0, 0, 1])
    check_numbers(measured)
    assert [(pair.one, pair.other) for pair in measured.pairs] == [(0, 2)]
    assert measured.gathered > 0


def test_workers_other_than_the_chief_are_measured_from_it(three: str) -> None:
    pair = measure_pair(three, 3, (2, 1), TimeLimits.of(LIMIT))
    assert (pair.one, pair.other) == (2, 1)
    assert min(pair.round_trip, pair.there, pair.back) > 0


def test_the_bytes_to_be_sent_are_removed(two: str) -> None:
    with probing(two, 2, [0, 1], TimeLimits.of(LIMIT)) as probe:
        probe.reach(0, 1)
    with tf.Graph().as_default(), tf.compat.v1.Session(two) as session:
        with tf.device("/job:worker/task:0/cpu:0"):
            name = link_probe._SHARED_NAME
            variable = tf.raw_ops.VarHandleOp(dtype=tf.uint8, shape=tf.TensorShape(None), shared_name=name)
            exists = tf.raw_ops.VarIsInitializedOp(resource=variable)
        assert not session.run(exists)


def test_no_rewrite_removes_or_merges_equal_transfers(two: str) -> None:
    with probing(two, 2, [0, 1], TimeLimits.of(LIMIT)) as probe:
        probe._fill([1], 1 << 19)
        received = [probe._copy(probe._copy(probe._sources[1].value, 1), 0).op for _ in range(3)]
        metadata = tf.compat.v1.RunMetadata()
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        probe._runner.session.run(received, options=options, run_metadata=metadata)
    nodes = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    assert sum("edge_" in node.timeline_label and "[0.5MB]" in node.timeline_label for node in nodes) == 3


def _servers_with_a_broken_link() -> str:
    """Returns the target of the first of three servers, of which the second cannot reach the third."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    *addresses, nowhere = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    seen = [addresses, [*addresses[:2], nowhere], addresses]
    chief, *_ = [_server(own, index) for index, own in enumerate(seen)]
    return chief


def _server(addresses: Sequence[str], index: int) -> str:
    target: str = tf.distribute.Server(tf.train.ClusterSpec({"worker": list(addresses)}), "worker", index).target
    return target


@pytest.fixture(scope="module")
def broken() -> str:
    return _servers_with_a_broken_link()


def test_two_workers_that_cannot_send_to_each_other_are_named(broken: str) -> None:
    names = ["10.0.0.1", "10.0.0.2:0", "10.0.0.2:1"]
    with pytest.raises(
        ClusterError, match=r"10\.0\.0\.2:0 and 10\.0\.0\.2:1 cannot send to each other: failed to connect.*YAML"
    ):
        measure_network(broken, [0, 1, 1], LIMIT, names)


def test_a_single_pair_fails_with_the_error_of_tensorflow(broken: str) -> None:
    with pytest.raises(tf.errors.UnavailableError):
        measure_pair(broken, 3, (1, 2), TimeLimits.of(LIMIT))


def test_pairs_of_many_machines_are_few() -> None:
    machines = [worker // 2 for worker in range(128)]
    pairs = pairs_of(machines)
    assert len(set(pairs)) == len(pairs) == 63 + 62 + 64
    assert pairs[:2] == [(0, 1), (0, 2)]
    assert (2, 4) in pairs
    assert (2, 6) not in pairs


def test_all_pairs_of_eight_machines_are_measured() -> None:
    assert len(pairs_of(range(8))) == 28


def test_machines_need_not_be_numbered_in_order() -> None:
    assert pairs_of([3, 1, 3]) == [(0, 2), (0, 1)]


@pytest.mark.parametrize("workers", [2, 3, 7, 64, 1024])
def test_each_worker_sends_and_receives_equally_in_an_exchange(workers: int) -> None:
    links = exchange(workers)
    assert len(set(links)) == len(links) <= max(1000, workers)
    assert all(source != target for source, target in links)
    for ends in zip(*links, strict=True):
        counts = [ends.count(worker) for worker in range(workers)]
        assert min(counts) == max(counts) > 0
    if workers < 30:
        assert len(links) == workers * (workers - 1)


def test_all_others_send_to_the_chief() -> None:
    assert gathering(4) == [(1, 0), (2, 0), (3, 0)]
    assert len(set(gathering(5000))) == 1000
