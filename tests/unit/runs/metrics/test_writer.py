"""The chief's files: a line once all workers have reported, whatever the order in which reports arrive."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from autodist.errors import ResourceSpecError
from autodist.proto import strategy_pb2
from autodist.resources import MetricsSection, ResourceSpec
from autodist.runs.metrics import writer as writer_module
from autodist.runs.metrics.line_file import LineFile
from autodist.runs.metrics.records import StepReport, WorkerReport
from autodist.runs.metrics.writer import MOST_PENDING, MetricsWriter
from autodist.runs.restarts import EarlierStarts

NODES = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}


def writer(folder: Path, **more: Any) -> MetricsWriter:
    section = MetricsSection(folder=str(folder), **more)
    return MetricsWriter(ResourceSpec.from_dict(NODES), section)


def report(step: int, *names: str, seconds: float = 0.01, **more: Any) -> WorkerReport:
    each = StepReport(steps=4, timed=4, inside=4 * seconds, period=0.05, outside=0.01, examples=32, **more)
    return WorkerReport(step=step, steps=dict.fromkeys(names or ("train",), each), peak_memory=7, bytes_sent=9)


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def test_a_line_has_the_figures_of_all_workers(tmp_path: Path) -> None:
    made = writer(tmp_path / "new" / "folder")
    made.receive(1, report(4, seconds=0.02))
    assert lines(tmp_path / "new" / "folder") == []
    made.receive(0, report(4, traced=(0.008, 0.005, 0.0, 0.002)))
    (line,) = lines(tmp_path / "new" / "folder")
    assert line.pop("time") >= line.pop("started")
    own, other = line.pop("by_worker")
    assert line == {
        "restarts": 0, "step": 4, "name": "train", "steps": 4, "seconds": pytest.approx(0.01),
        "examples_per_second": pytest.approx(64 / 0.05), "workers": 2,
    }  # fmt: skip
    assert own == {
        "worker": "localhost:0", "seconds": pytest.approx(0.01), "outside": 0.0025, "compute": 0.005, "wait": 0.002,
        "send": 0.0, "traced": 0.008, "peak_memory": 7, "bytes_sent": 9,
    }  # fmt: skip
    assert (other["worker"], other["seconds"]) == ("localhost:1", pytest.approx(0.02))
    assert [other[name] for name in ("compute", "wait", "send", "traced")] == [None] * 4


def test_late_reports_belong_to_the_number_that_they_name_and_each_name_has_a_line(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.receive(0, report(4, "a", "b"))
    made.receive(0, report(8, "a", seconds=0.03))
    made.receive(1, report(4, "a", "b"))
    assert [(line["step"], line["name"]) for line in lines(tmp_path)] == [(4, "a"), (4, "b")]
    made.receive(1, report(8, "a"))
    assert lines(tmp_path)[-1]["by_worker"][0]["seconds"] == pytest.approx(0.03)


def test_a_worker_that_is_far_behind_is_left_out_of_its_lines(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for number in range(1, MOST_PENDING + 2):
        made.receive(0, report(number))
    (line,) = lines(tmp_path)
    assert (line["step"], line["examples_per_second"]) == (1, None)
    assert line["by_worker"][1] == {"worker": "localhost:1"} | dict.fromkeys(
        ("seconds", "outside", "compute", "wait", "send", "traced", "peak_memory", "bytes_sent")
    )
    made.receive(1, report(1))
    assert [line["step"] for line in lines(tmp_path)] == [1]
    made.receive(1, report(2))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_line_without_the_chief_has_no_time_of_its_own(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.receive(1, report(3))
    made.close(waits=False)
    (line,) = lines(tmp_path)
    assert (line["seconds"], line["examples_per_second"]) == (None, None)
    made.receive(1, report(4))  # the file is closed
    assert len(lines(tmp_path)) == 1


def test_the_end_waits_for_the_last_reports_and_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "END_LIMIT", 0.01)
    made = writer(tmp_path)
    made.receive(0, report(3))
    made.close(waits=True)
    assert lines(tmp_path)[0]["by_worker"][1]["seconds"] is None


def test_a_restart_appends_with_its_number_and_the_plan_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = writer(tmp_path)
    first.receive(0, report(4))
    first.close(waits=False)
    earlier = EarlierStarts(2, "worker1 was lost", 4, 3)
    monkeypatch.setattr(writer_module, "earlier_starts", lambda: earlier)
    second = writer(tmp_path)
    strategy = strategy_pb2.Strategy(builder="Auto")
    strategy.choice.alternatives.add(name="AllReduce", seconds=0.25)
    strategy.choice.terms.add(name="computation", seconds=0.2)
    strategy.choice.basis = "measured links"
    second.add_plan("train", strategy, "a table", 3)
    second.receive(0, report(4))
    second.close(waits=False)
    assert [line["restarts"] for line in lines(tmp_path)] == [0, 2]
    (plan,) = lines(tmp_path, "plans.jsonl")
    assert (plan["restarts"], plan["fault"], plan["step"], plan["plan"]) == (2, "worker1 was lost", 3, "a table")
    assert (plan["predicted"], plan["terms"], plan["basis"]) == (0.25, {"computation": 0.2}, "measured links")
    assert (plan["builder"], plan["workers"], plan["name"]) == ("Auto", ["localhost:0", "localhost:1"], "train")


def test_a_folder_that_cannot_be_written_is_reported_with_its_place_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    yaml = tmp_path / "cluster.yml"
    yaml.write_text(f"nodes: [{{address: localhost}}]\nmetrics:\n  folder: {tmp_path}/file/metrics\n")
    spec = ResourceSpec.from_file(yaml)
    assert spec.metrics is not None
    with pytest.raises(ResourceSpecError) as raised:
        MetricsWriter(spec, spec.metrics)
    problem = "cannot be written (Not a directory); allowed: the path of a folder that this process may write"
    assert str(raised.value) == f"{yaml}:3: metrics.folder: {tmp_path}/file/metrics {problem}"


def test_a_full_disk_is_logged_once_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: LineFile, line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LineFile, "add", fail)
    made = writer(tmp_path)
    with caplog.at_level(logging.WARNING, "autodist"):
        for number in (4, 8):
            for worker in (0, 1):
                made.receive(worker, report(number))
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    made = writer(tmp_path, tensorboard=True)
    for worker in (1, 0):
        made.receive(worker, report(4))
    made.close(waits=False)
    (file,) = tmp_path.glob("events.out.tfevents.*")
    scalars = {
        value.tag: (event.step, value.simple_value)
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    assert scalars["train/seconds"] == (4, pytest.approx(0.01))
    assert scalars["train/localhost:1/bytes_sent"] == (4, 9.0)
    assert scalars["run/workers"] == (4, 2.0)
    assert "train/localhost:1/wait" not in scalars
