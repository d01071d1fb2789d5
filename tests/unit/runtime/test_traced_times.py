"""Times of computing, sending and waiting from the statistics of one run."""

from __future__ import annotations

import pytest
from tensorflow.core.framework import step_stats_pb2

from autodist.runtime.traced_times import TracedTimes

HERE, THERE = "/job:worker/replica:0/task:1/device:CPU:0", "/job:worker/replica:0/task:0/device:CPU:0"


def stats(*ran: tuple[str, str, int, int]) -> step_stats_pb2.StepStats:
    """Returns statistics of operations, each with a device, a label, a start and a length in milliseconds."""
    made = step_stats_pb2.StepStats()
    for device, label, start, length in ran:
        nodes = made.dev_stats.add(device=device).node_stats
        nodes.add(node_name="n", timeline_label=label, all_start_nanos=start * 10**6, all_end_rel_nanos=length * 10**6)
    return made


def ran(operation: str, start: int, length: int, device: str = HERE) -> tuple[str, str, int, int]:
    return device, f"n = {operation}(a, b)", start, length


def test_a_moment_counts_once_and_computing_comes_before_sending_and_waiting() -> None:
    moved = HERE, "[4.0KB] edge_1_x from /job:worker/replica:0/task:0 to /job:worker/replica:0/task:1", 4, 3
    times = TracedTimes.of(
        stats(ran("MatMul", 0, 4), ran("Mul", 2, 3), moved, ran("QueueDequeueV2", 0, 10), ran("Add", 12, 1)), 1
    )
    assert times is not None
    assert (times.whole, times.compute, times.send, times.wait) == pytest.approx((0.013, 0.006, 0.002, 0.003))


def test_collectives_send_reading_counts_as_none_and_other_workers_do_not_count() -> None:
    times = TracedTimes.of(
        stats(ran("CollectiveReduceV2", 1, 2), ran("IteratorGetNext", 3, 4), ran("MatMul", 0, 90, THERE)), 1
    )
    assert times is not None
    assert (times.whole, times.compute, times.send, times.wait) == pytest.approx((0.006, 0.0, 0.002, 0.0))


def test_a_run_without_operations_of_the_worker_has_no_times() -> None:
    assert TracedTimes.of(stats(ran("MatMul", 0, 1, THERE)), 1) is None
