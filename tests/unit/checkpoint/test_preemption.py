"""SIGTERM to a chief whose run then saves a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from autodist.checkpoint import save_schedule
from autodist.checkpoint.save_schedule import Preemption, Schedule
from autodist.cluster import preemption_notice
from autodist.cluster.failure import LEAVING
from autodist.errors import ResourceSpecError, WorkerFailedError
from autodist.resources import ResourceSpec


class Run:
    """The parts of a run that are read."""

    def __init__(self, max_restarts: int = 0) -> None:
        self.step, self.is_in_step, self.end = 0, False, RunEnd()
        self.spec = SimpleNamespace(max_restarts=max_restarts)


class RunEnd:
    """The parts of a RunEnd that are read."""

    reason, is_lost, is_leaving = "", False, False

    def watch_leaving(self, heed: Callable[[str], None]) -> None:
        self.leaves = heed

    def lose(self, worker: str, reason: str) -> NoReturn:
        raise WorkerFailedError(worker, reason)


@pytest.fixture(autouse=True)
def ended_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """By which signals the process would end; those that it handles are as before afterwards."""
    found: list[Any] = []

    def end_script_by(number: signal.Signals) -> NoReturn:
        found.append(number)
        raise SystemExit(128 + number)

    monkeypatch.setattr(save_schedule, "watch_script_end", lambda: SimpleNamespace(end_script_by=end_script_by))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield found
    signal.signal(signal.SIGTERM, before)


def schedule() -> Schedule:
    return Schedule(True, lambda said: said, None, None)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_run_is_saved_before_it_ends_by_the_signal(ended_by: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    run, of_steps, of_fit = Run(), schedule(), schedule()
    preempted = Preemption(run)  # type: ignore[arg-type]
    preempted.begin()
    preempted.watch(of_steps)
    run.step = 3
    assert not of_steps.is_due(3)
    terminate()
    assert caplog.messages == [
        "SIGTERM: the run is saved after this step, and then ends; another SIGTERM ends it at once."
    ]
    preempted.watch(of_fit)  # begins later, and saves
    run.step = 5
    assert of_fit.is_due(5)
    with pytest.raises(SystemExit) as raised:
        of_fit.saved(5)
    assert (raised.value.code, ended_by, run.end.reason) == (
        143,
        [signal.SIGTERM],
        "SIGTERM came; 5 steps were made",
    )


@pytest.mark.parametrize("case", ["a second one", "all is saved", "the run is lost"])
def test_it_ends_at_once_by_a_second_one_and_where_nothing_more_is_saved(
    case: str, ended_by: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, of_steps = Run(), schedule()
    preempted = Preemption(run)  # type: ignore[arg-type]
    preempted.begin()
    preempted.watch(of_steps)
    if case != "all is saved":
        run.step, run.end.is_lost = 1, case == "the run is lost"
    if case == "a second one":
        terminate()
        assert run.end.is_leaving
        terminate()  # as SLURM does
        assert ended_by == []
        monkeypatch.setattr(preemption_notice, "REPEATS_WITHIN", 0.0)
    with pytest.raises(SystemExit):
        terminate()
    assert ended_by == [signal.SIGTERM]


def test_a_step_that_runs_is_waited_for_where_those_before_it_are_saved(ended_by: list[Any]) -> None:
    run, of_steps = Run(), schedule()
    preempted = Preemption(run)  # type: ignore[arg-type]
    preempted.begin()
    preempted.watch(of_steps)
    run.is_in_step = True
    terminate()
    assert ended_by == []
    run.step = 1
    assert of_steps.is_due(1)
    with pytest.raises(SystemExit):
        of_steps.saved(1)
    assert (ended_by, run.end.reason) == ([signal.SIGTERM], "SIGTERM came; 1 steps were made")


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_run_is_saved_where_it_came_to_another_worker(
    max_restarts: int, ended_by: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    run, of_steps = Run(max_restarts), schedule()
    preempted = Preemption(run)  # type: ignore[arg-type]
    preempted.begin()
    preempted.watch(of_steps)
    for worker in ("10.0.0.2", "10.0.0.3"):
        run.end.leaves(worker)
    then = "restarts" if max_restarts else "ends"
    assert caplog.messages == [
        f"SIGTERM came to {worker}: the run is saved after this step, and then {then}."
        for worker in ("10.0.0.2", "10.0.0.3")
    ]
    run.step = 2
    assert of_steps.is_due(2)
    with pytest.raises(WorkerFailedError if max_restarts else SystemExit) as raised:
        of_steps.saved(2)
    if max_restarts:
        assert (raised.value.worker, raised.value.reason, ended_by) == ("10.0.0.2", LEAVING, [])
    else:
        assert (raised.value.code, ended_by) == (143, [signal.SIGTERM])
        assert run.end.reason == "SIGTERM came to 10.0.0.2; 2 steps were made"


def test_a_signal_to_all_workers_counts_once_and_ends_the_run(ended_by: list[Any]) -> None:
    run, of_steps = Run(max_restarts=1), schedule()
    preempted = Preemption(run)  # type: ignore[arg-type]
    preempted.begin()
    preempted.watch(of_steps)
    run.step = 1
    run.end.leaves("10.0.0.2")
    terminate()
    assert ended_by == []
    with pytest.raises(SystemExit):
        of_steps.saved(1)
    assert (ended_by, run.end.reason) == ([signal.SIGTERM], "SIGTERM came; 1 steps were made")


def test_preemption_is_refused_if_the_signal_cannot_arrive() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with pytest.raises(ResourceSpecError, match="the script has a handler of its own; remove that handler"):
        Preemption(Run()).begin()  # type: ignore[arg-type]
    errors: list[str] = []

    def begin() -> None:
        try:
            Preemption(Run()).begin()  # type: ignore[arg-type]
        except ResourceSpecError as error:
            errors.append(str(error))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert "only in the main thread" in errors[0]


def test_the_yaml_may_request_preemption() -> None:
    nodes: dict[str, Any] = {"nodes": [{"address": "localhost"}]}
    spec = ResourceSpec.from_dict(nodes | {"checkpoint": {"folder": "/c", "on_preempt": True}})
    assert spec.checkpoint is not None and spec.checkpoint.on_preempt
    with pytest.raises(ResourceSpecError, match="nor is on_preempt true"):
        ResourceSpec.from_dict(nodes | {"checkpoint": {"folder": "/c"}})
    given = ResourceSpec.from_dict({"nodes": "given", "checkpoint": {"folder": "/c", "on_preempt": True}})
    assert given.checkpoint == spec.checkpoint
