"""`metrics` in the YAML on two workers: figures of both in each line, across a kill and a restart."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

TRAIN = """
with ad.scope():
    step = training(tf.Variable([1.0, 2.0, 3.0]))
for number in range(40):
    step(np.ones((8 + me, 3), np.float32))
    if number == 29:
        note(f"at30_{me}")
        wait_for("on")
"""


def spec_of(folder: Path, **more: Any) -> dict[str, Any]:
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    return {"nodes": nodes, "metrics": {"folder": str(folder), "every_steps": 10, "tensorboard": True}} | more


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_line_has_the_figures_of_both_workers(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    with Training(tmp_path / "run", TRAIN, spec_of(folder)) as run:
        run.note("on")
        assert run.wait(90) == 0, run.stderr
        run.assert_gone()
    found = lines(folder)
    assert [(line["step"], line["steps"], line["workers"]) for line in found] == [(n, 10, 2) for n in (10, 20, 30, 40)]
    for line in found:
        assert [measured["worker"] for measured in line["by_worker"]] == ["localhost:0", "localhost:1"]
        period = line["by_worker"][0]["seconds"] + line["by_worker"][0]["outside"]
        if all(measured["traced"] is None for measured in line["by_worker"]):
            assert line["examples_per_second"] == pytest.approx(17 / period)
        for measured in line["by_worker"]:
            assert measured["peak_memory"] > 1 << 20
    for worker in (0, 1):
        own = [line["by_worker"][worker] for line in found]
        sent = [measured["bytes_sent"] for measured in own]
        assert sent == sorted(sent) and sent[0] > 0
        assert any(measured["wait"] is not None for measured in own)
        for measured in own:
            if measured["traced"] is not None:
                assert 0 < measured["compute"] + measured["wait"] + measured["send"] <= measured["traced"]
    assert list(folder.glob("events.out.tfevents.*"))
    assert "Profiler session" not in run.stderr


def test_a_killed_chief_leaves_whole_lines(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    with Training(tmp_path / "run", TRAIN, spec_of(folder)) as run:
        run.wait_for_note("at30_0")
        os.kill(run.chief.pid, signal.SIGKILL)
        run.wait(30)
        run.assert_gone()
    assert [line["step"] for line in lines(folder)] in ([10, 20], [10, 20, 30])
    assert (folder / "metrics.jsonl").read_text().endswith("}\n")


LOST_ONCE = """
with ad.scope():
    step = training(tf.Variable([1.0, 2.0, 3.0]))
for number in range(40):
    step(np.ones((8, 3), np.float32))
    if number == 24 and me == 1 and not has_note("lost"):
        note("lost")
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_restart_appends_lines_that_name_it(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    with Training(tmp_path / "run", LOST_ONCE, spec_of(folder, max_restarts=1)) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
    complete = [(line["restarts"], line["step"]) for line in lines(folder) if line["steps"] == 10]
    assert complete == [(0, 10), (0, 20), (1, 10), (1, 20), (1, 30), (1, 40)]
    plans = [json.loads(line) for line in (folder / "plans.jsonl").read_text().splitlines()]
    assert [plan["restarts"] for plan in plans] == [0, 1]
    assert "localhost:1" in plans[1]["fault"]
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2


def test_a_folder_that_cannot_be_written_ends_the_script_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Training(tmp_path / "run", TRAIN, spec_of(tmp_path / "file" / "metrics")) as run:
        assert run.wait(60) != 0
        run.assert_gone()
    assert "metrics.folder" in run.stderr and "cannot be written (Not a directory)" in run.stderr
    assert "worker1" not in run.stdout
