"""The launch of the other workers next to the chief's script, by a coordinator that only records its calls."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from autodist.cluster.script import Script
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec
from autodist.runs import worker_launch
from autodist.runs.startup_progress import StartupProgress
from autodist.runs.worker_launch import WorkerLaunch


def spec_of(workers: int) -> ResourceSpec:
    nodes = [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}]
    return ResourceSpec.from_dict({"nodes": nodes})


class Coordinator:
    """In place of the one that starts processes; `prepare` returns once it may."""

    may_prepare: threading.Event
    fault: ClusterError | None = None

    def __init__(self, spec: ResourceSpec, on_failure: Callable[..., None], script: Script, env: Mapping[str, str]):
        self.environment, self.script, self.did = env, script, list[str]()

    def prepare(self) -> None:
        assert self.may_prepare.wait(10)
        if self.fault is not None:
            raise self.fault

    def start_scripts(self) -> None:
        self.did.append("started scripts")

    def start(self, payload: bytes) -> None:
        self.did.append("started")

    def abort(self, reason: str, is_failure: bool = True) -> None:
        self.did.append(f"aborted: {reason}")
        self.fault = ClusterError("the run was ended")
        self.may_prepare.set()


@pytest.fixture(autouse=True)
def coordinated(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Coordinator]]:
    monkeypatch.setattr(worker_launch, "Coordinator", Coordinator)
    monkeypatch.setattr(Coordinator, "may_prepare", threading.Event(), raising=False)
    monkeypatch.setattr(Script, "of_this_process", staticmethod(lambda: Script(("train.py",), "/", None)))
    yield Coordinator
    worker_launch._launches.clear()
    worker_launch._early.clear()


def begin(workers: int = 2, seed: int = 1) -> Any:
    return WorkerLaunch(spec_of(workers), seed, b"", StartupProgress(is_chief=True))


def test_workers_are_started_beside_the_script_in_the_environment_of_that_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OF_THE_SCRIPT", "before")
    one = begin()
    os.environ["OF_THE_SCRIPT"] = "after"
    assert one.coordinator.did == []
    one.check()
    one.coordinator.may_prepare.set()
    with caplog.at_level(logging.INFO, "autodist"):
        one.wait()
    assert one.coordinator.did == ["started"]
    assert one.coordinator.environment["OF_THE_SCRIPT"] == "before"
    assert caplog.messages[-1].endswith(" s: started localhost:1")


def test_an_obstacle_to_starting_workers_is_reported_at_once_and_raised_in_the_script(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Coordinator, "fault", ClusterError("no machine there"))
    one = begin()
    one.coordinator.may_prepare.set()
    one._thread.join(10)
    assert caplog.messages == [
        "no machine there\nThe script raises this error at its next use of AutoDist, or at its end."
    ]
    for use in (one.check, one.wait):
        with pytest.raises(ClusterError, match="no machine there"):
            use()
    assert one.coordinator.did == []


def test_nothing_is_wrong_where_the_script_ends_before_the_others_are_reached() -> None:
    one = begin()
    one.abort("the script has ended without a step", is_failure=False)
    one.check()
    assert one.coordinator.did == ["aborted: the script has ended without a step"]
    assert not one._thread.is_alive()


def test_a_second_autodist_for_the_same_machines_has_the_workers_of_the_first() -> None:
    one = begin(seed=7)
    assert WorkerLaunch.under_way(spec_of(2)) is one
    assert one.seed == 7


def test_a_second_autodist_for_other_machines_ends_the_workers_of_the_first() -> None:
    one = begin(2)
    assert WorkerLaunch.under_way(spec_of(3)) is None
    assert one.coordinator.did[0] == "aborted: the script has made another AutoDist"
    assert WorkerLaunch.under_way(spec_of(2)) is None


def test_workers_that_a_step_runs_on_are_left_to_it() -> None:
    one = begin(2)
    one.has_joined = True
    assert WorkerLaunch.under_way(spec_of(3)) is None
    assert one.coordinator.did == []
    one.coordinator.may_prepare.set()
    one.wait()


def begin_early(workers: int = 2) -> Any:
    WorkerLaunch.begin_early(spec_of(workers), Script.of_this_process())
    return worker_launch._early[-1]


def take_early(workers: int = 2) -> Any:
    return WorkerLaunch.take_early(spec_of(workers), 7, b"payload", StartupProgress(is_chief=True))


def test_an_early_launch_starts_the_scripts_and_goes_on_with_the_first_autodist() -> None:
    early = begin_early()
    assert WorkerLaunch.under_way(spec_of(2)) is None
    early.coordinator.may_prepare.set()
    assert take_early() is early
    early.wait()
    assert (early.seed, early.coordinator.did[-1]) == (7, "started")
    assert take_early() is None
    assert WorkerLaunch.under_way(spec_of(2)) is early


@pytest.mark.parametrize("changed", ["machines", "environment"])
def test_an_early_launch_for_what_has_changed_since_is_ended(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = begin_early()
    monkeypatch.setenv("TF2_BEHAVIOR", "1")  # TensorFlow's import sets it on every worker
    if changed == "environment":
        monkeypatch.setenv("OF_THE_SCRIPT", "new")
    assert take_early(3 if changed == "machines" else 2) is None
    assert early.coordinator.did[0] == "aborted: the machines, the script or its environment have changed"
    early._thread.join(10)
    assert "started" not in early.coordinator.did


def test_the_fault_of_an_early_launch_is_raised_by_the_autodist_that_takes_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Coordinator, "fault", ClusterError("no machine there"))
    early = begin_early()
    early.coordinator.may_prepare.set()
    early._thread.join(10)
    assert caplog.messages == []
    with pytest.raises(ClusterError, match="no machine there"):
        take_early().wait()
