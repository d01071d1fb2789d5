"""Workers' traces: their clocks, and unreadable files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autodist.cli.command_errors import UsageError
from autodist.cli.tracing.files import TracedTransfer, read_traces
from autodist.cli.tracing.summary import alignment_lines
from tests.unit.cli.tracing.traces import MS, moved, place, ran, write


def test_each_event_stands_on_the_clock_of_the_machine_where_it_ran(tmp_path: Path) -> None:
    ahead = 3600.0
    write(tmp_path, 0, ran("MatMul", 10, 1), ran("QueueEnqueueV2", 10 + ahead * 1e3, 1, task=1))
    write(tmp_path, 1, ran("MatMul", 12 + ahead * 1e3, 1, task=1), ran("QueueEnqueueV2", 12, 1), clock_ahead=ahead)
    first, second = read_traces(tmp_path)["step_1"]
    assert [event.start for event in first.events] == pytest.approx([10 * MS, 10 * MS])
    assert [event.start for event in second.events] == pytest.approx([12 * MS, 12 * MS])


def test_operations_and_transfers_are_told_from_tensorflows_labels(tmp_path: Path) -> None:
    write(tmp_path, 0, ran("MatMul", 0, 1), moved("step_1/Sum:0", 0, 1, 1, 2, "1.5KB"))
    product, sent = read_traces(tmp_path)["step_1"][0].events
    assert (product.operation, product.device, product.transfer) == ("MatMul", "CPU:0", None)
    assert sent.transfer == TracedTransfer(source=0, target=1, tensor="step_1/Sum", bytes=1536)
    assert sent.task == 1


def test_steps_and_workers_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in ("step_10", "step_2"):
        for worker in (10, 2, 0):
            write(tmp_path, worker, ran("MatMul", 0, 1), step=step)
    traces = read_traces(tmp_path)
    assert list(traces) == ["step_2", "step_10"]
    assert [trace.worker for trace in traces["step_2"]] == [0, 2, 10]


def test_missing_and_unaligned_traces_are_reported(tmp_path: Path) -> None:
    write(tmp_path, 0, ran("MatMul", 0, 1), workers=4)
    write(tmp_path, 1, ran("MatMul", 0, 1), workers=4, clock_uncertainty=0.002)
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": place(2)}}, ran("MatMul", 0, 1)]
    (tmp_path / "step_1.worker_2.json").write_text(json.dumps({"traceEvents": events}))
    told = list(alignment_lines(read_traces(tmp_path)["step_1"]))
    assert told[0] == "clocks are aligned with the chief's to ± 2 ms"
    assert told[1].startswith("worker 2's clock was not compared with the chief's")
    assert told[2].startswith("missing: *.worker_3.json; copy them from")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "has no traces (for example step_1.worker_0.json). Run the script with AUTODIST_TRACE=FOLDER"),
        ("{", "step_1.worker_0.json is not a trace written by AutoDist"),
        ('{"traceEvents": [{"ph": "X"}]}', "is not a trace written by AutoDist (traceEvents.0.pid: Field required)"),
        ('{"traceEvents": []}', "step_1.worker_0.json has no events"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str | None, told: str) -> None:
    if content is not None:
        (tmp_path / "step_1.worker_0.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        read_traces(tmp_path)
    assert told in str(caught.value)
