"""`autodist trace`: one file for all workers, and its summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autodist.cli.app import app
from autodist.cli.tracing.summary import PREDICTED
from autodist.strategies.plan_cost import Prediction
from tests.unit.cli.tracing.traces import moved, ran, write

RUNNER = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path, 0,
        ran("MatMul", 100, 4), ran("QueueDequeueV2", 104, 6, queue="q"), moved("a", 0, 1, 5104, 1), machine="one",
    )  # fmt: skip
    write(
        tmp_path, 1,
        ran("MatMul", 5104, 5, task=1), ran("QueueEnqueueV2", 109, 1, queue="q"), machine="two", clock_ahead=5.0,
        clock_uncertainty=0.0004,
    )  # fmt: skip
    return tmp_path


def test_all_workers_stand_in_one_file_as_processes_on_one_clock(folder: Path) -> None:
    done = RUNNER.invoke(app, ["trace", str(folder)])
    assert done.exit_code == 0, done.output
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "worker 0 (one)", 1: "worker 1 (two)"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ran_there = [e for e in events if e["ph"] == "X"]
    assert all((e["pid"], e["tid"]) in threads for e in ran_there)
    assert [(e["pid"], e["name"], e["ts"], e["cat"]) for e in ran_there] == [
        (0, "matmul", 0.0, "computing"),
        (0, "queuedequeuev2", 4000.0, "waiting"),
        (1, "receives a from worker 0", 4000.0, "transfer"),
        (1, "matmul", 4000.0, "computing"),
        (0, "queueenqueuev2", 9000.0, "computing"),
    ]
    assert any("for worker 1" in name for name in threads.values())
    assert "worker 0 (one) waits 4 ms (40%) for worker 1 (two), which computed" in done.output
    assert "clocks are aligned with the chief's to ± 400 µs" in done.output


def test_what_auto_predicted_stands_beside_the_worker_that_computed_longest(folder: Path) -> None:
    assert "predicted by" not in RUNNER.invoke(app, ["trace", str(folder)]).stdout
    terms = {"computation": 0.006, "updates": 0.001, "processor time of transfers": 5e-4, "network": 0.001, "waits": 0}
    write(
        folder, 0,
        ran("MatMul", 100, 4), ran("QueueDequeueV2", 104, 6, queue="q"), moved("a", 0, 1, 5104, 1), machine="one",
        predicted={"seconds": 0.0085, "terms": terms},
    )  # fmt: skip
    table = RUNNER.invoke(app, ["trace", str(folder)], env={"COLUMNS": "140"}).stdout
    assert "step_1: predicted by Auto, and traced on worker 1 (two), which computed longest" in " ".join(table.split())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    assert rows[-4:] == [
        ["a step", "8.5 ms", "6 ms"],
        ["computing (computation, updates)", "7 ms", "5 ms"],
        ["sending (network, processor time of transfers)", "1.5 ms", "0 µs"],
        ["waiting (waits, shared cores)", "0 µs", "0 µs"],
    ]


def test_every_part_of_a_prediction_is_compared() -> None:
    assert {part for parts in PREDICTED.values() for part in parts} == set(Prediction(0, 0, 0, 0, 0, 0, 0, ()).terms)


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_the_table_fits_the_terminal_and_leaves_nothing_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = RUNNER.invoke(app, ["trace", str(folder)]).stdout.partition("└")[0]
    assert max(map(len, table.splitlines())) <= columns
    rows = [line.split("│")[1:-1] for line in table.splitlines() if "│" in line]
    assert "".join("".join(row[0].split()) for row in rows) == "worker0(one)worker1(two)"
    assert "…" not in table


def test_the_file_goes_where_it_is_told_and_what_was_merged_is_merged_again(folder: Path) -> None:
    file = folder / "all.json"
    for _ in range(2):
        done = RUNNER.invoke(app, ["trace", str(folder), "--output", str(file)])
        assert done.exit_code == 0, done.output
    assert file.exists()
    assert not (folder / "trace.json").exists()


@pytest.mark.parametrize("words", [["absent"], ["{folder}/empty"], ["{folder}", "-o", "{folder}/no/where.json"], []])
def test_unusable_input_is_reported_with_status_2(folder: Path, words: list[str]) -> None:
    (folder / "empty").mkdir()
    done = RUNNER.invoke(app, ["trace", *(word.format(folder=folder) for word in words)])
    assert done.exit_code == 2
    assert done.stderr
    assert "Traceback" not in done.stderr
