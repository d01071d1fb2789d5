"""The start of a run with more machines, and the one without them if that start fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from autodist.errors import ClusterError, MachinesAwayError, StrategyError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs import restarts
from autodist.runs.growth import continue_after, starts_again_after
from autodist.runs.lost_run import Joining, LostRun
from autodist.runs.restarts import MOST_FAILED_JOINS, VARIABLE, earlier_starts

SPEC = ResourceSpec.from_dict(
    {
        "nodes": [{"address": f"10.0.0.{number}", "chief": number == 1} for number in (1, 2, 3)],
        "min_nodes": 1,
        "checkpoint": {"folder": "saved", "every_steps": 9},
    }
)
KILLED = WorkerFailedError("10.0.0.3", "was ended by SIGKILL")


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Records the states of the next starts."""
    found: list[Any] = []
    monkeypatch.setattr(restarts, "re_exec_at_the_end", lambda told: found.append(json.loads(told[VARIABLE])))
    monkeypatch.setattr(restarts, "_seeds", [7])
    earlier_starts.cache_clear()
    yield found
    earlier_starts.cache_clear()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the state of the starts before this one."""
    return lambda **state: monkeypatch.setenv(VARIABLE, json.dumps(state))


def test_a_run_starts_with_a_machine_that_is_back_and_no_restart_is_counted(
    begun: list[Any], starts: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    starts(count=1, left_out=["10.0.0.2", "10.0.0.3"])
    joining = Joining(("10.0.0.3",), "10.0.0.3 is back", ("10.0.0.2",), (1, 2))
    refused = {"10.0.0.2": "it has another TensorFlow"}
    lost = LostRun(ClusterError("more machines"), 13, 12, missing=("10.0.0.2", "10.0.0.3"), refused=refused)
    continue_after(LostRun(**{**vars(lost), "joining": joining}), SPEC.without(["10.0.0.2", "10.0.0.3"]), None)
    assert caplog.messages == [
        "all workers start again from the checkpoint of step 12, on 2 workers instead of 1, since 10.0.0.3 is back "
        "(which `max_restarts` does not limit)."
    ]
    (state,) = begun
    assert (state["count"], state["left_out"], state["joined"], state["saved"], state["seeds"]) == (
        1, ["10.0.0.2"], ["10.0.0.3"], 12, [7],
    )  # fmt: skip
    assert state["refused"] == refused


TRIAL = {"saved": 12, "left_out": ["10.0.0.2"], "joined": ["10.0.0.3"]}


@pytest.mark.parametrize(
    ("lost", "failed"),
    [
        (LostRun(KILLED, None, 12, failed=("10.0.0.3",)), 1),
        (LostRun(KILLED, 15, 12, failed=("10.0.0.3",)), 1),
        (LostRun(ClusterError("its AutoDist is older"), None, 12), 1),
        (LostRun(StrategyError("32 examples, 3 replicas"), 13, 12), MOST_FAILED_JOINS),
    ],
    ids=["before the first step", "later", "not started", "the script cannot"],
)
def test_a_start_with_a_machine_that_fails_before_a_save_is_followed_by_one_without(
    lost: LostRun, failed: int, begun: list[Any], starts: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    starts(**TRIAL)
    lost = LostRun(**{**vars(lost), "missing": ("10.0.0.2",)})
    continue_after(lost, SPEC.without(["10.0.0.2"]), None)
    (state,) = begun
    assert (state["count"], set(state["left_out"]), state["joined"]) == (0, {"10.0.0.2", "10.0.0.3"}, [])
    assert state["failed_joins"] == {"10.0.0.3": failed}
    again = "It is not tried again." if failed == MOST_FAILED_JOINS else "It is tried again later."
    assert caplog.messages == [
        f"the run goes on without 10.0.0.3 from the checkpoint of step 12, since {lost.place} {lost.fault}. {again}"
    ]


@pytest.mark.parametrize(
    "lost",
    [
        LostRun(KILLED, 15, 14, failed=("10.0.0.3",)),
        LostRun(WorkerFailedError("10.0.0.1:1", "was ended by SIGKILL"), 15, 12),
    ],
    ids=["after a save", "another worker"],
)
def test_later_and_other_losses_are_those_of_any_run(
    lost: LostRun, begun: list[Any], starts: Callable[..., None]
) -> None:
    starts(**TRIAL)
    spec = SPEC.without(["10.0.0.2"])
    continue_after(lost, spec, None)
    assert begun == []
    continue_after(lost, spec.model_copy(update={"max_restarts": 1}), None)
    assert (begun[0]["count"], begun[0]["joined"]) == (1, [])


GIVEN = ResourceSpec.from_dict(
    {"nodes": "given", "min_nodes": 2, "checkpoint": {"folder": "saved", "every_steps": 9}}
).with_nodes([{"address": "localhost", "cpus": [0, 1, 2], "workers": 3, "chief": True}], [])
JOINING = Joining(("2",), "process 2 on n2 has joined", (), (2, 3))


def test_a_late_process_joins_by_a_start_that_keeps_those_that_are_left_out(
    begun: list[Any], starts: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    starts(count=1, left_out=["5"])
    lost = LostRun(ClusterError("the run starts again"), 13, 12, joining=JOINING)
    assert starts_again_after(lost, GIVEN)
    continue_after(lost, GIVEN, None)
    assert caplog.messages == [
        "all workers start again from the checkpoint of step 12, on 3 workers instead of 2, since process 2 on n2 has "
        "joined (which `max_restarts` does not limit)."
    ]
    (state,) = begun
    assert (state["count"], state["left_out"], state["joined"]) == (1, ["5"], ["2"])


def test_a_start_with_a_late_process_that_fails_before_a_save_is_followed_by_one_without(
    begun: list[Any], starts: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    starts(saved=12, joined=["2"])
    assert not starts_again_after(LostRun(KILLED, 15, 12, failed=("1",)), GIVEN), "another process was lost"
    assert starts_again_after(LostRun(KILLED, 15, 12, failed=("2",)), GIVEN)
    lost = LostRun(KILLED, 13, 12)
    assert starts_again_after(lost, GIVEN)
    continue_after(lost, GIVEN, None)
    assert caplog.messages == [
        "the run goes on without process 2 from the checkpoint of step 12, since in step 13 10.0.0.3 was ended by "
        "SIGKILL."
    ]
    (state,) = begun
    assert (state["count"], state["left_out"], state["joined"]) == (0, ["2"], [])


@pytest.mark.parametrize(
    ("lost", "restarts", "starts_again"),
    [
        (LostRun(KILLED, 15, 12), 1, True),
        (LostRun(KILLED, 15, 12), 0, False),
        (LostRun(ClusterError("it could not be started"), None, 12), 1, False),
        (LostRun(KILLED, 15, 12, chief_leaves=True), 1, False),
        (LostRun(KILLED, 15, 12, chief_leaves=True, joining=JOINING), 1, False),
    ],
    ids=["lost", "no restarts", "not started", "the chief leaves", "the chief leaves a growing run"],
)
def test_the_processes_of_an_elastic_run_wait_for_another_start_if_there_is_one(
    lost: LostRun, restarts: int, starts_again: bool
) -> None:
    spec = GIVEN.model_copy(update={"max_restarts": restarts})
    assert starts_again_after(lost, spec) is starts_again


def test_a_start_that_a_process_has_left_before_the_checks_is_followed_by_one_without_it(
    begun: list[Any], starts: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    starts(count=1, left_out=["5"], joined=["2"])
    lost = LostRun(MachinesAwayError("its agent has ended", ("localhost:1",)), None, None, away=("1",))
    assert starts_again_after(lost, GIVEN)
    continue_after(lost, GIVEN, None)
    assert caplog.messages == [
        "all workers start again from the script's beginning (no checkpoint was saved), in 0 s, since process 1 left "
        "before the run had started."
    ]
    (state,) = begun
    assert (state["count"], state["left_out"], state["joined"]) == (1, ["5"], [])


def test_a_process_that_leaves_every_start_before_the_checks_is_left_out_in_the_end(
    begun: list[Any], starts: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(restarts, "Event", lambda: SimpleNamespace(wait=waits.append))
    lost = LostRun(MachinesAwayError("its agent has ended", ("localhost:1",)), None, None, away=("1",))
    state: dict[str, Any] = {"left_out": ["5"], "failed_joins": {"2": 1}}
    for _ in range(MOST_FAILED_JOINS):
        assert "1" not in state["left_out"]
        earlier_starts.cache_clear()
        starts(**state)
        continue_after(lost, GIVEN, None)
        state = begun[-1]
    assert (state["left_out"], state["failed_joins"]) == (["5", "1"], {"1": MOST_FAILED_JOINS, "2": 1})
    assert waits == [0.0, 2.0, 4.0]
    assert caplog.messages[-1].endswith("From now on the run refuses process 1, after 3 such starts.")


def test_the_number_of_processes_is_kept_on_the_way_to_the_workers() -> None:
    received = ResourceSpec.from_payload(GIVEN.to_payload())
    assert (received.min_nodes, received.is_elastic, received.takes_machines_in) == (2, True, True)
