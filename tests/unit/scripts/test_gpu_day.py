"""scripts/gpu_day.py: the parts run one after the other, each ends within its limit, and the table has all of them."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.jobs import environment
from gpu_parts import checks
from gpu_parts.processes import CheckError, Ended, two_workers

from autodist.cli.checking.messages import SeenGPUs
from tests.loaded_scripts import load_script

gpu_day = load_script("gpu_day")
ENDED_LIMIT = 30_000
"""Milliseconds within which a killed process has to be gone."""


def part(name: str, code: str, limit: float = 30) -> Any:
    return gpu_day.Part(name, (sys.executable, "-S", "-c", code), limit)


def day(
    monkeypatch: pytest.MonkeyPatch, fakes: list[Any], gpus: int = 1, options: tuple[str, ...] = ()
) -> tuple[int, list[int]]:
    """Runs the command with these parts; returns its status, and the numbers of GPUs for which it has made parts."""
    made_for: list[int] = []

    def parts(count: int) -> list[Any]:
        made_for.append(count)
        return fakes

    monkeypatch.setattr(gpu_day, "parts", parts)
    monkeypatch.setattr(gpu_day, "see_gpus", lambda: SeenGPUs(count=gpus, reason="" if gpus else "no driver"))
    monkeypatch.setattr(gpu_day, "query_gpus", lambda fields, limit: ["Tesla A"] * gpus)
    monkeypatch.setattr(gpu_day.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["gpu_day.py", *options])
    return gpu_day.main(), made_for


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.splitlines()
    assert ", Tesla A, TensorFlow " in lines[0] or ", no GPU, TensorFlow " in lines[0]
    assert lines[1:4] == ["", "| part | result | figures, or the reason | seconds |", "|---|---|---|---|"]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[4:]]


def test_parts_after_one_that_fails_run_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes = [
        part("first", "print('figures'); print('3 ms | 4 ms\\n')"),
        part(
            "second",
            "import sys; print('figures'); print('why\\nI0000 00:00:17.5 3 worker.cc', file=sys.stderr); sys.exit(3)",
        ),
        part("third", "import sys; print('DIFFERENT'); sys.exit(1)"),
        part("fourth", "pass"),
    ]
    status, made_for = day(monkeypatch, fakes)
    assert status == 1
    assert made_for[-1] == 1
    found = rows(capsys)
    assert [row[:3] for row in found] == [
        ["first", "passed", r"3 ms \| 4 ms"],
        ["second", "failed", "why (status 3)"],
        ["third", "failed", "DIFFERENT (status 1)"],
        ["fourth", "passed", "none"],
    ]
    assert all(row[3].isdigit() for row in found)


def starts_descendant(fifo: Path) -> str:
    """Returns code that starts a process which holds the FIFO until its end, in ten minutes."""
    shell = ["sh", "-c", f"exec 3>{fifo}; echo waits for NCCL; exec sleep 600"]
    start = f"import subprocess; held = subprocess.Popen({shell}, stdout=subprocess.PIPE)"
    return f"{start}; print(held.stdout.readline().decode(), flush=True)"


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[tuple[Path, select.poll]]:
    """A FIFO, and a poll that answers once the processes that held it have ended."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ended = select.poll()
    ended.register(descriptor, 0)
    yield path, ended
    os.close(descriptor)


def test_a_part_that_hangs_ends_with_its_descendants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fifo: tuple[Path, select.poll]
) -> None:
    path, ended = fifo
    hangs = part("hangs", f"{starts_descendant(path)}; held.wait()", limit=3)
    status, _ = day(monkeypatch, [hangs, part("next", "print('ran')")])
    assert status == 1
    assert [row[:3] for row in rows(capsys)] == [
        ["hangs", "failed", "killed after 3 s; its last line: waits for NCCL"],
        ["next", "passed", "ran"],
    ]
    assert ended.poll(ENDED_LIMIT)


def test_a_descendant_that_outlives_its_part_is_killed(fifo: tuple[Path, select.poll]) -> None:
    path, ended = fifo
    outcome = gpu_day.run(part("forks", starts_descendant(path)), 30)
    assert (outcome.status, outcome.text) == ("passed", "waits for NCCL")
    assert ended.poll(ENDED_LIMIT)


def test_without_a_gpu_all_parts_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = day(monkeypatch, [part("first", "raise SystemExit(1)"), part("second", "raise SystemExit(1)")], gpus=0)
    assert status == 0
    assert rows(capsys) == [[name, "skipped", "no GPU: no driver", ""] for name in ("first", "second")]


def test_only_the_chosen_parts_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = [part("first", "print(1)"), part("second", "print(2)")]
    assert day(monkeypatch, fakes, gpus=4, options=("--only", "second")) == (0, [1, 4])
    assert [row[:3] for row in rows(capsys)] == [["second", "passed", "2"]]


def test_a_part_gets_the_time_that_is_left_or_is_skipped() -> None:
    limits = iter([100.0, 0.5, -1.0])
    fakes = [part("first", "print(1)"), part("second", "import time; time.sleep(600)"), part("third", "print(3)")]
    first, second, third = gpu_day.run_all(fakes, lambda: next(limits))
    assert (first.status, second.status, third.status) == ("passed", "failed", "skipped")
    assert second.text.startswith("killed after 0 s")
    assert third.text == "earlier parts have taken the whole 600 s"


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_limits_leave_a_minute_to_count_the_gpus(gpus: int) -> None:
    made = gpu_day.parts(gpus)
    assert sum(one.limit for one in made) <= gpu_day.WHOLE - 60
    assert len({one.name for one in made}) == len(made)
    own = [one.command for one in made if "gpu_parts" in one.command]
    assert {command[3] for command in own} == {*checks.CHECKS, "speed"}
    assert all(f"--gpus={min(gpus, 2)}" in command for command in own)
    examples = [Path(one.command[-1]) for one in made if "verify" in one.command]
    assert len(examples) == 3
    assert all(example.is_file() for example in examples)


def test_two_workers_share_the_only_gpu_and_split_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpus, expected in ((1, ["0", "0"]), (2, ["0", "1"])):
        assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in two_workers(gpus)] == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in two_workers(2)] == ["GPU-b", "GPU-a"]


def losses(*values: float) -> Ended:
    return Ended(0, json.dumps({"losses": values}), "")


@pytest.mark.parametrize(
    ("gpus", "chief", "worker", "result"),
    [
        (1, Ended(1, "", "W NCCL WARN Duplicate GPU detected : rank 0 and rank 1\nUnknownError\n"), losses(),
         "refuses two ranks on one GPU: W NCCL WARN Duplicate GPU detected : rank 0 and rank 1"),
        (1, Ended(1, "", "OSError: disk full\n"), losses(), "ended with status 1; its last line: OSError: disk full"),
        (1, Ended(None, "", "NCCL error\nwaits\n"), losses(), "was killed at the time limit; its last line: waits"),
        (2, Ended(1, "", "NCCL error\n"), losses(), "ended with status 1; its last line: NCCL error"),
        (2, losses(2, 1), losses(), "loss 1.0000 (two workers, 2 GPUs), 1.0010 (one device); largest relative "
         "difference 1.0e-03, at most 0.01"),
        (2, losses(2, float("nan")), losses(), "loss nan (two workers"),
    ],
)  # fmt: skip
def test_nccl_trains_or_refuses(
    monkeypatch: pytest.MonkeyPatch, gpus: int, chief: Ended, worker: Ended, result: str
) -> None:
    monkeypatch.setattr(checks, "run", lambda runs, limit: [chief, worker, losses(2, 1.001)])
    try:
        text = checks.nccl(gpus, 1)
        is_passed = True
    except CheckError as error:
        text, is_passed = str(error), False
    assert result in text
    assert is_passed == text.startswith(("refuses", "loss 1.0000"))


def test_a_bench_process_sees_the_gpus_only_if_it_trains_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "1")
    assert environment(1)["CUDA_VISIBLE_DEVICES"] == "-1"
    assert environment(1, on_gpus=True)["CUDA_VISIBLE_DEVICES"] == "1"
