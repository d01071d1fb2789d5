"""The breakdown of a step's time: every millisecond counts once, and waits are attributed to the delaying worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from autodist.cli.tracing.files import read_traces
from autodist.cli.tracing.spent import ANYBODY, Meanwhile, TimeSpent, time_spent
from autodist.cli.tracing.summary import summary_lines
from tests.unit.cli.tracing.traces import MS, moved, ran, write


def times(folder: Path) -> list[TimeSpent]:
    return time_spent(read_traces(folder)["step_1"])


def waiting(spent: TimeSpent) -> dict[tuple[int, Meanwhile], float]:
    """In milliseconds."""
    return {key: pytest.approx(time / MS) for key, time in spent.waiting.items()}


def test_time_of_computation_counts_as_computation_even_beside_transfers(tmp_path: Path) -> None:
    write(
        tmp_path, 0,
        ran("MatMul", 0, 4), ran("Relu", 3, 3), ran("QueueDequeueV2", 0, 10, queue="q/1/0"), moved("a", 1, 0, 5, 3),
    )  # fmt: skip
    (spent,) = times(tmp_path)
    assert (spent.took, spent.computing, spent.sending, spent.reading) == (10 * MS, 6 * MS, 2 * MS, 0)
    assert waiting(spent) == {(ANYBODY, Meanwhile.ELSE): 2}
    assert spent.rest == 0


def test_a_tensor_is_on_its_way_from_when_it_is_made_and_waited_for_before(tmp_path: Path) -> None:
    write(tmp_path, 0, ran("MatMul", 0, 1), moved("read", 1, 0, 1, 9), ran("Read", 2, 5, task=1, name="read"))
    write(tmp_path, 1, ran("MatMul", 0, 7, task=1))
    spent, _ = times(tmp_path)
    assert spent.sending == 3 * MS
    assert waiting(spent) == {(1, Meanwhile.COMPUTING): 6}


def test_a_worker_waits_for_the_one_that_fills_its_queue(tmp_path: Path) -> None:
    write(
        tmp_path, 0,
        ran("MatMul", 0, 1), ran("QueueDequeueV2", 1, 9, queue="q/1/0"), ran("QueueDequeueV2", 1, 4, queue="q/2/0"),
        workers=3,
    )  # fmt: skip
    write(tmp_path, 1, ran("MatMul", 3, 6, task=1), ran("QueueEnqueueV2", 9.5, 0.1, queue="q/1/0"), workers=3)
    write(tmp_path, 2, ran("MatMul", 0, 4, task=2), ran("QueueEnqueueV2", 4.5, 0.1, queue="q/2/0"), workers=3)
    spent = times(tmp_path)[0]
    assert waiting(spent) == {(1, Meanwhile.ABSENT): 2, (1, Meanwhile.COMPUTING): 6, (1, Meanwhile.ELSE): 1}


def test_workers_that_wait_for_one_another_wait_for_the_one_that_sent_nothing(tmp_path: Path) -> None:
    def waits(worker: int, *others: int) -> list[object]:
        return [ran("QueueDequeueV2", 1, 99, task=worker, queue=f"q/{other}/{worker}") for other in others]

    def fills(worker: int, at: float, *others: int) -> list[object]:
        return [ran("QueueEnqueueV2", at, 0.1, task=other, queue=f"q/{worker}/{other}") for other in others]

    for worker, other in ((0, 2), (2, 0)):
        events = [ran("MatMul", 0, 1, task=worker), *waits(worker, 1, other), *fills(worker, 99, 1, other)]
        write(tmp_path, worker, *events, workers=3)  # type: ignore[arg-type]
    write(tmp_path, 1, ran("MatMul", 90, 8, task=1), *fills(1, 99, 0, 2), workers=3)  # type: ignore[arg-type]
    late = {(1, Meanwhile.ABSENT): 89, (1, Meanwhile.COMPUTING): 8, (1, Meanwhile.ELSE): 2}
    first, _, third = times(tmp_path)
    assert waiting(first) == waiting(third) == late
    told = list(summary_lines(times(tmp_path)))
    assert told[0].startswith(
        "worker 0 waits 89 ms (89%) for worker 1, which had not begun the step: check the work of its script"
    )
    assert told[-2] == "most of all workers' time is waiting for each other: 198 ms (95%)"
    assert told[-1] == "delayed most by worker 1, for which the others wait 198 ms together"


def test_a_collective_waits_for_the_last_to_come_and_sends_from_then_on(tmp_path: Path) -> None:
    write(tmp_path, 0, ran("MatMul", 0, 1), ran("CollectiveReduceV2", 1, 9))
    write(tmp_path, 1, ran("MatMul", 0, 7, task=1), ran("CollectiveReduceV2", 7, 3, task=1))
    first, second = times(tmp_path)
    assert waiting(first) == {(1, Meanwhile.COMPUTING): 6}
    assert (first.sending, second.sending) == (3 * MS, 3 * MS)
    assert waiting(second) == {}


def test_a_wait_as_short_as_times_of_today_can_tell_is_for_somebody(tmp_path: Path) -> None:
    begin, tick = 1795379667971010.75, 0.25  # microseconds since 1970 have no finer fractions
    assert (begin + (begin + tick)) / 2 == begin + tick
    work, wait = ran("MatMul", 0, 0.001), ran("QueueDequeueV2", 0, 0, queue="q/1/0")
    write(tmp_path, 0, work | {"ts": begin - 1}, wait | {"ts": begin, "dur": tick}, workers=1)
    (spent,) = times(tmp_path)
    assert spent.waiting == {(ANYBODY, Meanwhile.ELSE): tick}


def test_reading_data_is_told_by_itself(tmp_path: Path) -> None:
    write(tmp_path, 0, ran("IteratorGetNext", 0, 6), ran("MatMul", 6, 1), workers=1)
    (spent,) = times(tmp_path)
    assert (spent.reading, spent.computing) == (6 * MS, 1 * MS)
    assert list(summary_lines([spent]))[-1] == "most of all workers' time is reading data: 6 ms (86%)"


def test_bytes_are_told_by_worker(tmp_path: Path) -> None:
    write(tmp_path, 0, ran("MatMul", 0, 1), moved("a", 0, 1, 1, 1, "2.0MB"), moved("b", 0, 1, 2, 1, "1.0MB"))
    write(tmp_path, 1, ran("MatMul", 0, 1, task=1), moved("c", 1, 0, 1, 1, "1.0KB"))
    first, second = times(tmp_path)
    assert (first.sent, second.sent) == ({1: 3 << 20}, {0: 1 << 10})
