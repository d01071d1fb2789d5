"""SIGTERM that comes to a chief whose run is to be saved then."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from autodist.checkpoint import preemption
from autodist.checkpoint.preemption import Preemption
from autodist.checkpoint.schedule import Schedule
from autodist.errors import ResourceSpecError
from autodist.resources import ResourceSpec


class Run:
    """As far as it is asked."""

    step = 0
    end_reason = ""


@pytest.fixture(autouse=True)
def ended_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """By which signals the process would end; those that it handles are as before afterwards."""
    found: list[Any] = []
    monkeypatch.setattr(preemption, "watch_script_end", lambda: SimpleNamespace(end_by=found.append))
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
        "SIGTERM: what is trained is saved after this step, and the run ends; another one ends it at once."
    ]
    preempted.watch(of_fit)  # which begins later, and is the one that saves
    run.step = 5
    assert of_fit.is_due(5)
    with pytest.raises(SystemExit) as raised:
        of_fit.saved(5)
    assert (raised.value.code, ended_by, run.end_reason) == (143, [signal.SIGTERM], "SIGTERM came; 5 steps were made")


@pytest.mark.parametrize("is_second", [True, False])
def test_it_ends_at_once_by_a_second_one_and_where_all_is_saved(is_second: bool, ended_by: list[Any]) -> None:
    run, of_steps = Run(), schedule()
    preempted = Preemption(run)  # type: ignore[arg-type]
    preempted.begin()
    preempted.watch(of_steps)
    if is_second:
        run.step = 1
        terminate()
    with pytest.raises(SystemExit):
        terminate()
    assert ended_by == [signal.SIGTERM]


def test_where_the_signal_cannot_come_here_it_is_refused() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with pytest.raises(ResourceSpecError, match="the script handles that itself; leave its handler out"):
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
    assert "in the main thread alone" in errors[0]


def test_what_the_yaml_may_say() -> None:
    nodes: dict[str, Any] = {"nodes": [{"address": "localhost"}]}
    spec = ResourceSpec.from_dict(nodes | {"checkpoint": {"folder": "/c", "on_preempt": True}})
    assert spec.checkpoint is not None and spec.checkpoint.on_preempt
    with pytest.raises(ResourceSpecError, match="nor is on_preempt true"):
        ResourceSpec.from_dict(nodes | {"checkpoint": {"folder": "/c"}})
    with pytest.raises(ResourceSpecError, match=r"checkpoint\.on_preempt: a scheduler sends SIGTERM to all processes"):
        ResourceSpec.from_dict({"nodes": "given", "checkpoint": {"folder": "/c", "on_preempt": True}})
