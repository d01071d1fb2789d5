"""The decision to restart a run after the loss of a worker, and the arguments of its next start."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autodist.cluster.failure import LEAVING
from autodist.cluster.stalls import SAME_STEPS
from autodist.errors import ClusterError, MachinesAwayError, ResourceSpecError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs import restarts
from autodist.runs.cli_overrides import CliOverrides
from autodist.runs.lost_run import LostRun
from autodist.runs.restarts import (
    VARIABLE,
    EarlierStarts,
    backoff,
    earlier_starts,
    reason_not_to_restart,
    require_can_restart,
    restart,
)
from autodist.strategies import Mesh

KILLED = WorkerFailedError("localhost:1", "was ended by SIGKILL")


def spec_of(workers: int, restarts: int = 3) -> ResourceSpec:
    nodes = [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}]
    return ResourceSpec.from_dict({"nodes": nodes, "max_restarts": restarts})


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Records the arguments of a re-exec, and removes all waits."""
    found: list[Any] = []
    monkeypatch.setattr(restarts, "re_exec_at_the_end", lambda told: found.append(json.loads(told[VARIABLE])))
    monkeypatch.setattr(restarts, "_SHORTEST_WAIT", 0.0)
    monkeypatch.setattr(restarts, "has_lost_input", lambda: False)
    monkeypatch.setattr(restarts, "_seeds", [])
    earlier_starts.cache_clear()
    yield found
    earlier_starts.cache_clear()


def test_state_before_a_restart_reaches_the_next_start_but_no_child_process(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert restarts.seed_of_next_run(lambda: 7) == 7
    restart(LostRun(KILLED, step=5, saved=4), spec_of(2, 3))
    assert caplog.messages == [
        "all workers start again from the checkpoint of step 4 (restart 1 of 3, in 0 s), since in step 5 localhost:1 "
        "was ended by SIGKILL."
    ]
    earlier_starts.cache_clear()
    restarts._seeds.clear()
    monkeypatch.setenv(VARIABLE, json.dumps(begun[0]))
    assert (earlier_starts().count, earlier_starts().step, earlier_starts().saved) == (1, 5, 4)
    assert VARIABLE not in restarts.os.environ
    assert [restarts.seed_of_next_run(lambda: 8) for _ in range(2)] == [7, 8]


@pytest.mark.parametrize("when", ["before it is told", "while it waits"])
def test_a_checkpoint_that_was_removed_meanwhile_is_told_once(
    when: str, begun: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = tmp_path / "ckpt-2.index"
    if when == "while it waits":
        index.touch()
    restart(LostRun(KILLED, step=5, saved=4, saved_as=str(tmp_path / "ckpt-2")), spec_of(2, 3))
    index.unlink(missing_ok=True)
    earlier_starts.cache_clear()
    monkeypatch.setenv(VARIABLE, json.dumps(begun[0]))
    assert (earlier_starts().count, earlier_starts().saved, earlier_starts().saved_as) == (1, None, None)
    said = [message for message in caplog.messages if "was removed" in message]
    assert len(said) == 1 and f"{tmp_path}/ckpt-2" in said[0] and "of step 4" in said[0]
    assert "start again from the checkpoint of step 4 (" in caplog.text or "what is left of its checkpoints" in said[0]


def test_without_a_checkpoint_the_script_begins_from_its_beginning_and_says_so(
    begun: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "has_lost_input", lambda: True)
    restart(LostRun(KILLED, step=None, saved=None), spec_of(2, 1))
    assert "from the script's beginning (no checkpoint was saved)" in caplog.text
    assert caplog.messages[0].endswith(
        "before the first step localhost:1 was ended by SIGKILL. What was read of standard input is gone."
    )
    assert begun[0]["count"] == 1


def test_ctrl_c_while_it_waits_leaves_the_process_as_it_ends(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def wait(self, seconds: float) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(restarts, "Event", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        restart(LostRun(KILLED, 5, 4), spec_of(2, 3))
    assert begun == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkerFailedError("b", f"has ended its script, and a waits for it. {SAME_STEPS}"), "fail in the same way"),
        (WorkerFailedError("b", "ended, with exit status 0, without creating an AutoDist"), "fail in the same way"),
        (
            WorkerFailedError("b", "ended with exit status 1", ("autodist.errors.CaptureError: no",)),
            "fail in the same way",
        ),
        (ClusterError("no machine there"), "which is no loss"),
    ],
    ids=["other steps", "another path", "our own error", "never started"],
)
def test_an_error_that_the_script_would_repeat_is_not_retried(
    error: ClusterError, said: str, begun: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    restart(LostRun(error, 3, None), spec_of(2, 3))
    assert begun == []
    assert caplog.messages[0].startswith("not started again: ") and said in caplog.messages[0]
    assert caplog.records[0].levelno == logging.ERROR


def test_the_same_failure_twice_at_the_same_step_ends_the_run() -> None:
    stalled = WorkerFailedError("b", "and all others have waited for one another for 301 s, in a disk.")
    earlier = EarlierStarts(1, "b and all others have waited for one another for 333 s, in a disk", 5)
    assert reason_not_to_restart(earlier, LostRun(stalled, 5, 4), 3) == (
        "it has failed so in step 5 twice in a row, and would a third time."
    )
    assert reason_not_to_restart(earlier, LostRun(stalled, 6, 4), 3) is None
    assert reason_not_to_restart(earlier, LostRun(KILLED, 5, 4), 3) is None
    assert "twice in a row" in str(
        reason_not_to_restart(EarlierStarts(3, "localhost:1 was ended by SIGKILL", 5), LostRun(KILLED, 5, 4), 3)
    )
    assert (
        reason_not_to_restart(EarlierStarts(1, "localhost:2 was ended by SIGKILL", 5), LostRun(KILLED, 5, 4), 3) is None
    )


def test_an_error_right_after_a_checkpoint_counts_as_the_same_even_if_no_worker_has_joined() -> None:
    raised = WorkerFailedError("b", "ended with exit status 1", ("ValueError: no",))
    earlier = EarlierStarts(1, "b ended with exit status 1", 5)
    assert "twice in a row" in str(reason_not_to_restart(earlier, LostRun(raised, None, 4), 3))
    assert reason_not_to_restart(earlier, LostRun(raised, None, 2), 3) is None
    killed = WorkerFailedError("b", "was ended by SIGKILL")
    assert reason_not_to_restart(EarlierStarts(1, "b was ended by SIGKILL", 5), LostRun(killed, None, 4), 3) is None


def test_a_machine_that_stays_away_may_come_back_later() -> None:
    cut = WorkerFailedError("b", "was lost: it was not heard of for 25 s")
    assert (
        reason_not_to_restart(
            EarlierStarts(1, "b was lost: it was not heard of for 25 s", None), LostRun(cut, None, 4), 3
        )
        is None
    )
    away = MachinesAwayError("b: no route to host", ("b",))
    assert reason_not_to_restart(EarlierStarts(1, "b: no route to host", None), LostRun(away, None, 4), 3) is None


def test_the_process_ends_by_a_sigterm_to_the_chief(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker died before the step at which the run would have been saved."""
    ends: list[int] = []
    monkeypatch.setattr(restarts, "watch_script_end", lambda: SimpleNamespace(end_by=ends.append))
    restart(LostRun(KILLED, 5, 4, chief_leaves=True), spec_of(2, 3))
    assert (begun, ends) == ([], [signal.SIGTERM])
    assert caplog.messages == ["not started again: SIGTERM came, which ends the run."]


def test_it_ends_when_it_was_tried_as_often_as_it_may() -> None:
    assert (
        reason_not_to_restart(EarlierStarts(2, "", 1), LostRun(KILLED, 5, 4), 2)
        == "2 restarts were made, and `max_restarts` allows no more."
    )
    assert reason_not_to_restart(EarlierStarts(1, "", 1), LostRun(KILLED, 5, 4), 2) is None


def test_waits_double_and_stay_below_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [backoff(count, is_of_machines=True) for count in (1, 2, 3, 7, 1000)] == [1, 2, 4, 60, 60]


@pytest.mark.parametrize(
    ("lost", "waits"),
    [
        (LostRun(KILLED, 1, None), [0, 2]),
        (LostRun(KILLED, 1, None, leaving=("10.0.0.2",)), [1, 2]),
        (LostRun(WorkerFailedError("10.0.0.2", "was lost: the link is down"), 1, None), [1, 2]),
        (LostRun(MachinesAwayError("no answer", ("10.0.0.2",)), None, None), [1, 2]),
    ],
)
def test_a_run_that_lost_no_machine_starts_again_at_once(
    monkeypatch: pytest.MonkeyPatch, lost: LostRun, waits: list[float]
) -> None:
    monkeypatch.undo()
    assert [backoff(count, lost.is_of_machines) for count in (1, 2)] == waits


def test_restarts_are_refused_if_nothing_could_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    require_can_restart(spec_of(2))
    require_can_restart(spec_of(1, restarts=0))
    with pytest.raises(ResourceSpecError, match="max_restarts is 3.*there is one worker"):
        require_can_restart(spec_of(1))
    with pytest.raises(ResourceSpecError, match="a scheduler has started the processes.*let the scheduler"):
        require_can_restart(spec_of(2).as_given())
    monkeypatch.setenv("PYTHONINSPECT", "1")
    with pytest.raises(ResourceSpecError, match="shows a prompt"):
        require_can_restart(spec_of(2))


TWO_NODES = {
    "nodes": [{"address": "10.0.0.1", "chief": True}, {"address": "10.0.0.2"}, {"address": "10.0.0.3"}],
    "max_restarts": 1,
}


@pytest.mark.parametrize("count", [0, 1], ids=["first start", "restart"])
def test_a_machine_that_stays_away_is_left_out_where_enough_others_are_there(
    count: int, begun: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = LostRun(MachinesAwayError("no route", ("10.0.0.3",)), None, 4, ("10.0.0.3",))
    spec = ResourceSpec.from_dict(TWO_NODES | {"min_nodes": 2, "strategy": "PS"})
    monkeypatch.setenv(VARIABLE, json.dumps({"count": count, "fault": "killed", "step": 5}))
    restart(away, spec)
    assert caplog.messages == [
        "no answer: 10.0.0.3 is left out (`min_nodes` is 2), and the run starts from the checkpoint of step 4 on 2 "
        "nodes, among which variables and the global batch are distributed again."
    ]
    assert (begun[0]["count"], begun[0]["left_out"]) == (count, ["10.0.0.3"])
    left = spec.without(begun[0]["left_out"])
    assert [node.address for node in left.nodes] == ["10.0.0.1", "10.0.0.2"]
    assert (len(left.workers), left.max_restarts, left.strategy) == (2, 1, spec.strategy)
    assert spec.without(()) is spec
    assert ([node.address for node in left.missing], left.complete()) == (["10.0.0.3"], spec)


@pytest.mark.parametrize("least", [3, None], ids=["too few", "all"])
def test_a_machine_that_stays_away_ends_the_run_otherwise(
    least: int | None, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"count": 1}))
    away = LostRun(MachinesAwayError("no route", ("10.0.0.3",)), None, 4, ("10.0.0.3",))
    restart(away, ResourceSpec.from_dict(TWO_NODES | ({"min_nodes": least} if least else {})))
    assert begun == []


@pytest.mark.parametrize(
    ("sizes", "least", "left_out"),
    [
        ({"data": -1, "model": 2}, 2, ["10.0.0.2", "10.0.0.4"]),
        ({"data": -1, "model": 2}, 3, None),
        ({"data": 2, "model": 2}, 2, None),
        ({"data": -1}, 2, ["10.0.0.2"]),
    ],
    ids=str,
)
def test_on_a_mesh_whole_rows_are_left_out(
    sizes: dict[str, int], least: int, left_out: list[str] | None, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"count": 1, "fault": "killed", "step": 5}))
    away = LostRun(MachinesAwayError("no route", ("10.0.0.2",)), None, 4, ("10.0.0.2",))
    nodes = [{"address": f"10.0.0.{k}", "chief": k == 1} for k in range(1, 5)]
    restart(away, ResourceSpec.from_dict({"nodes": nodes, "max_restarts": 1, "min_nodes": least}), Mesh(mesh=sizes))
    assert (begun[0]["left_out"] if begun else None) == left_out


LEAVES = WorkerFailedError("10.0.0.3", LEAVING)


def test_a_machine_that_says_that_it_goes_away_is_left_out_at_once_where_enough_others_are_there(
    begun: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    spec = ResourceSpec.from_dict(TWO_NODES | {"min_nodes": 2})
    lost = LostRun(LEAVES, 13, 12, leaving=("10.0.0.3",))
    restart(lost, spec)
    assert caplog.messages == [
        "all workers start again from the checkpoint of step 12 (restart 1 of 1, in 0 s), since in step 13 10.0.0.3 "
        "was sent SIGTERM, which announces that its machine goes away. 10.0.0.3 is left out (`min_nodes` is 2)."
    ]
    assert (begun[0]["count"], begun[0]["left_out"]) == (1, ["10.0.0.3"])
    for least in ({"min_nodes": 3}, {}):
        restart(lost, ResourceSpec.from_dict(TWO_NODES | least))
        assert begun.pop()["left_out"] == []


def test_that_machines_go_away_twice_at_a_step_is_no_fault_of_the_script() -> None:
    earlier = EarlierStarts(1, f"10.0.0.3 {LEAVING}", 13)
    assert reason_not_to_restart(earlier, LostRun(LEAVES, 13, 12), 2) is None
    assert "allows no more" in str(reason_not_to_restart(earlier, LostRun(LEAVES, 13, 12), 1))


def test_a_machine_that_refuses_is_not_left_out_and_the_next_start_says_why(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"count": 1, "fault": "killed", "step": 5}))
    refused = LostRun(ClusterError("The run cannot start:\n  10.0.0.3  its host key has changed."), None, 4)
    restart(refused, ResourceSpec.from_dict(TWO_NODES | {"min_nodes": 2, "max_restarts": 2}))
    assert caplog.messages[0].endswith(
        "(restart 2 of 2, in 0 s), since before the first step the run cannot start:\n  10.0.0.3  its host key has "
        "changed."
    )
    assert begun[0]["left_out"] == []


def test_min_nodes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ResourceSpecError, match="min_nodes: 4 is more than the number of nodes, 3"):
        ResourceSpec.from_dict(TWO_NODES | {"min_nodes": 4})
    alone = {"min_nodes": 2, "max_restarts": 0}
    with pytest.raises(ResourceSpecError, match="min_nodes is 2: .* Add `checkpoint`.*`max_restarts`"):
        require_can_restart(ResourceSpec.from_dict(TWO_NODES | alone))
    saved = alone | {"checkpoint": {"folder": "saved", "every_steps": 9}}
    require_can_restart(ResourceSpec.from_dict(TWO_NODES | saved))
    require_can_restart(ResourceSpec.from_dict({"nodes": "given", **saved}))
    with pytest.raises(ResourceSpecError, match="min_nodes is 2: .* Add `checkpoint`.*`max_restarts`"):
        require_can_restart(ResourceSpec.from_dict({"nodes": "given", **alone}))
    for lacking in ("min_nodes", "checkpoint"):
        keys = {"rejoin_interval": 5, **saved}
        del keys[lacking]
        with pytest.raises(
            ResourceSpecError, match=f"rejoin_interval: .*allowed: no `rejoin_interval`, or `{lacking}`"
        ):
            ResourceSpec.from_dict(TWO_NODES | keys)


def test_the_interval_of_an_elastic_run_needs_a_number_of_processes() -> None:
    saving = {"checkpoint": {"folder": "saved", "every_steps": 9}, "rejoin_interval": 5, "max_restarts": 0}
    given = ResourceSpec.from_dict({"nodes": "given", **saving})
    with pytest.raises(ResourceSpecError, match="rejoin_interval is 5, but .* fixed. Run `autodist run --nodes"):
        require_can_restart(given)
    require_can_restart(CliOverrides(given=True, min_nodes=2).spec(lambda: given))


def test_the_command_s_number_stands_in_place_of_the_yaml_s() -> None:
    assert CliOverrides(max_restarts=1).spec(lambda: spec_of(2)).max_restarts == 1
    assert CliOverrides(max_restarts=0).spec(lambda: spec_of(2)).max_restarts == 0
    assert CliOverrides(workers=2).spec(lambda: spec_of(1)).max_restarts == 3
    assert ResourceSpec.from_payload(spec_of(2).to_payload()).max_restarts == 3
    with pytest.raises(ResourceSpecError, match="max_restarts.*0 to 1000"):
        spec_of(2, restarts=-1)
