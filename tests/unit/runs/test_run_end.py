"""RunEnd: the order of a run's shutdown, and the cause of its loss."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from autodist.errors import AutoDistError, CheckpointError, ClusterError, MachinesAwayError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs import end_with_script, run_end
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.run_end import RunEnd

SPEC = ResourceSpec.from_dict(
    {
        "nodes": [
            {"address": "10.0.0.1", "cpus": [0], "chief": True},
            {"address": "10.0.0.2", "cpus": [0], "ssh_config": "c"},
        ],
        "ssh": {"c": {"username": "ann"}},
    }
)


class Script:
    """A simulated script and its end, as far as RunEnd reads it."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self.is_held = False
        self.interrupted_at: float | None = None
        self.is_terminated = False
        self.uncaught: list[BaseException] = []
        self.ended_by: list[signal.Signals] = []

    def end_by(self, number: signal.Signals) -> None:
        self.ended_by.append(number)

    @property
    def is_bad(self) -> bool:
        return self.raised is not None


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()
    monkeypatch.setattr(run_end, "watch_script_end", lambda: made)
    return made


@pytest.fixture
def done() -> list[str]:
    """Returns the recorded actions, in order."""
    return []


def end_of(
    done: list[str],
    await_updates: Callable[[], None] | None = None,
    is_chief: bool = True,
    end_threads: Callable[[], None] | None = None,
    **known: Any,
) -> RunEnd:
    peers = SimpleNamespace(
        **{"failure": None, "have_joined": True, "is_raised": False, "fault": None, "leaving": (), **known},
        abort=lambda reason: done.append(f"abort: {reason}"),
        finish=lambda: done.append("finish"),
    )
    made = RunEnd(
        SPEC,
        is_chief,
        peers,  # type: ignore[arg-type]
        FailedStepGuard(lambda: True),
        await_updates or (lambda: done.append("updates")),
        lambda: done.append("session"),
        end_threads or (lambda: done.append("threads")),
    )
    made.before.append(lambda: done.append("before"))
    return made


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_callbacks_that_need_values_run_before_the_worker_leaves(script: Script, done: list[str]) -> None:
    end_of(done).finish()
    assert done == ["updates", "before", "session", "finish", "threads"]


def test_a_failure_before_the_end_is_raised_after_all_workers_have_ended(script: Script, done: list[str]) -> None:
    end = end_of(done)
    end.before.insert(0, raising(CheckpointError("no room")))
    with pytest.raises(CheckpointError, match="no room"):
        end.finish()
    assert done == ["updates", "before", "session", "finish", "threads"]


def test_a_script_that_fails_stops_the_others_first(
    script: Script, done: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    script.raised = ValueError("its own")
    end = end_of(done)
    end.before.insert(0, raising(CheckpointError("no room")))
    with caplog.at_level(logging.ERROR, "autodist"):
        end.finish()
    assert done == ["session", "abort: the chief's script failed", "before", "threads"]
    assert "no room" in caplog.text


def test_updates_that_fail_end_the_run(script: Script, done: list[str]) -> None:
    with pytest.raises(ClusterError, match="an update"):
        end_of(done, raising(ClusterError("an update failed"))).finish()
    assert done == ["session", "abort: the chief's updates failed", "threads"]


def test_ctrl_c_that_was_caught_is_told(script: Script, done: list[str]) -> None:
    script.interrupted_at = 1.0
    end_of(done).finish()
    assert done[:2] == ["session", "abort: the chief was interrupted"]


def test_ctrl_c_before_the_end_has_begun_stops_the_others(
    script: Script, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(is_quiet: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_end, "quiet_tensorflow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        end_of(done).finish()
    assert done == ["abort: the chief was interrupted"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("comes_in", ["end_threads", "finish"])
def test_a_signal_at_the_end_leaves_no_thread_in_tensorflow(
    script: Script, done: list[str], interrupt: BaseException, comes_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python aborts a process if a thread returns from TensorFlow while it ends."""
    interrupts = [interrupt]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        done.append("threads")

    script.raised = ValueError("its own")
    end = end_of(done, end_threads=interrupted, is_chief=False)
    if comes_in == "finish":
        monkeypatch.setattr(end, "finish", interrupted)
    monkeypatch.setattr(end_with_script, "watch_script_end", lambda: script)
    run: Any = SimpleNamespace(end=end, spec=SPEC, recorder=None)
    end_with_script.end_at_exit(run, SimpleNamespace(), os.getpid())  # type: ignore[arg-type]
    assert done[-1:] == ["threads"] and not interrupts


@pytest.mark.parametrize("is_chief", [True, False])
def test_ctrl_c_that_another_worker_s_script_caught_ends_its_process_by_the_signal(
    script: Script, done: list[str], is_chief: bool
) -> None:
    """Otherwise the chief would report an exit status of 0 as the cause."""
    script.interrupted_at = 1.0
    end_of(done, is_chief=is_chief).finish()
    assert script.ended_by == ([] if is_chief else [signal.SIGINT])


def test_the_end_of_another_worker_that_no_step_has_told_is_raised(script: Script, done: list[str]) -> None:
    with pytest.raises(WorkerFailedError):
        end_of(done, failure=WorkerFailedError("10.0.0.2", "exit status 1")).finish()


AWAY = MachinesAwayError("10.0.0.2 is away", ("10.0.0.2",))


@pytest.mark.parametrize("raised", [None, AWAY])
def test_a_run_is_lost_by_what_came_of_others(script: Script, done: list[str], raised: BaseException | None) -> None:
    script.raised = raised
    lost = end_of(done, fault=AWAY, leaving=("10.0.0.1",)).lost(5, 3)
    assert lost is not None
    assert (lost.error, lost.step, lost.saved, lost.away, lost.leaving) == (AWAY, 5, 3, ("10.0.0.2",), ())


@pytest.mark.parametrize("raised, interrupted_at", [(ValueError("its own"), None), (None, 1.0)])
def test_a_run_is_not_lost_where_the_script_ended_it(
    script: Script, done: list[str], raised: BaseException | None, interrupted_at: float | None
) -> None:
    script.raised, script.interrupted_at = raised, interrupted_at
    assert end_of(done, fault=AWAY).lost(5, 3) is None


def test_a_run_that_sigterm_to_the_chief_ends_is_not_lost_and_one_that_is_to_save_first_says_so(
    script: Script, done: list[str]
) -> None:
    end = end_of(done, fault=AWAY)
    end.is_leaving = True
    lost = end.lost(5, 3)
    assert lost is not None and lost.chief_leaves
    script.is_terminated = True
    assert end.lost(5, 3) is None


def test_a_run_that_nothing_has_ended_is_not_lost(script: Script, done: list[str]) -> None:
    assert end_of(done).lost(5, 3) is None


def test_a_step_that_failed_in_a_thread_is_told(script: Script, done: list[str]) -> None:
    script.raised = None
    end = end_of(done)
    script.uncaught.append(AutoDistError("in a thread"))
    script.interrupted_at = 1.0
    with pytest.raises(ClusterError, match="a step failed in a thread of the script: AutoDistError: in a thread"):
        end.finish()


def observed(end: RunEnd) -> FailedStepGuard:
    """Has the chief observe the worker; returns its guard."""
    end._peers.on_observed()
    end._failed_step.close()
    return end._failed_step


def test_an_exception_counts_as_a_missed_step_once_it_has_ended_a_script_whose_process_stays(
    script: Script, done: list[str]
) -> None:
    end, script.raised = end_of(done), ValueError("bad")
    assert not observed(end)  # the script goes through `finally` blocks, or Python runs AutoDist's exit handler
    assert end.how_it_failed(script.raised) == "failed in a step (ValueError: bad), and its script went on"
    script.is_held = True
    assert observed(end).error is script.raised
    assert end.how_it_failed(script.raised) == (
        "has ended its script by an exception (ValueError: bad), but not its process, which waits for an exit handler"
    )
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="reader")
    thread.start()
    try:
        assert "which waits for its thread reader (a thread with daemon=True" in end.how_it_failed(script.raised)
    finally:
        go.set()
        thread.join()


def test_a_step_that_was_missed_before_stays_the_reason(script: Script, done: list[str]) -> None:
    end, script.is_held = end_of(done), True
    assert not observed(end)
    missed = CheckpointError("no space")
    end._failed_step.note(missed)
    script.raised = ValueError("bad")
    assert observed(end).error is missed
    assert end.how_it_failed(missed) == (
        "failed in a step (autodist.errors.CheckpointError: no space), and its script went on"
    )
