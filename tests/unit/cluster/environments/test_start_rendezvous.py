"""The start of the rendezvous when a script creates its AutoDist in a scheduler's cluster."""

from __future__ import annotations

import json
import logging

import pytest

from autodist.cluster.environments import start_rendezvous as meeting
from autodist.cluster.environments.launcher_env import OF_ONE_PROCESS, RENDEZVOUS_DONE
from autodist.cluster.environments.quorum import Quorum
from autodist.cluster.environments.start_rendezvous import join_rendezvous, warn_if_alone
from autodist.errors import ClusterError, ResourceSpecError
from autodist.resources import ResourceSpec

GIVEN = ResourceSpec.from_dict({"nodes": "given", "strategy": "PS"})
ALONE = {"AUTODIST_INDEX": "0", "AUTODIST_WORKERS": "1", "AUTODIST_CHIEF": "node1:15000"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_completed", [])
    for name in OF_ONE_PROCESS:
        monkeypatch.setenv(name, "")  # restores later changes
        monkeypatch.delenv(name)


def enter(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_cluster_of_one_process_is_this_machine_and_needs_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, **ALONE)
    spec = join_rendezvous(GIVEN, 2, lambda: 0)
    (worker,) = spec.workers
    assert worker.devices == ("cpu:0", "cpu:1")
    assert spec.strategy == GIVEN.strategy


def test_a_second_autodist_of_the_script_has_the_same_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, **ALONE)
    assert join_rendezvous(GIVEN, None, lambda: 0) == join_rendezvous(GIVEN, None, lambda: 0)


def test_a_process_that_the_chief_has_started_does_not_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, **ALONE, **{RENDEZVOUS_DONE: "yes"})
    with pytest.raises(ClusterError, match='under `if __name__ == "__main__":`'):
        join_rendezvous(GIVEN, None, lambda: 0)


def test_without_a_secret_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, **ALONE | {"AUTODIST_WORKERS": "2"})
    with pytest.raises(ResourceSpecError, match="AUTODIST_SECRET is missing"):
        join_rendezvous(GIVEN, None, lambda: 0)


def test_who_trains_alone_beside_others_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "autodist"):
        enter(monkeypatch, **ALONE)
        warn_if_alone(1)
        assert not caplog.records, "one of one"
        enter(monkeypatch, AUTODIST_WORKERS="x")
        warn_if_alone(1)
        assert not caplog.records, "variables that nobody has asked for"
        enter(monkeypatch, AUTODIST_INDEX="1", AUTODIST_WORKERS="4")
        warn_if_alone(1)
    assert "process 1 of 4 (by hand), and it trains without the others: set `nodes: given`" in caplog.text


@pytest.mark.parametrize(
    ("machines", "environment", "is_warned"),
    [
        (1, {"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}, True),  # a batch script
        (1, {"SLURM_JOB_NUM_NODES": "2"}, True),  # salloc
        (2, {"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}, False),  # the YAML lists both, for SSH
        (1, {"SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0"}, False),
        (1, {"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # a step of one
    ],
)
def test_a_batch_script_without_srun_is_warned_of_the_machines_that_it_does_not_use(
    machines: int,
    environment: dict[str, str],
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = {"SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "17"} if "SLURM_STEP_NUM_TASKS" in environment else {}
    enter(monkeypatch, **environment, **step)
    with caplog.at_level(logging.WARNING, "autodist"):
        warn_if_alone(machines)
    assert ("SLURM has allocated 2 machines to this job, and this run uses 1" in caplog.text) is is_warned


def test_an_elastic_run_needs_no_more_processes_than_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, **ALONE)
    with pytest.raises(ResourceSpecError, match=r"min_nodes is 2, more than the number of processes, 1 \(by hand\)"):
        join_rendezvous(GIVEN, None, lambda: 0, Quorum(2, 60.0))


def test_processes_whose_servers_have_given_addresses_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["127.0.0.1:20001", "127.0.0.1:20002"]}
    enter(monkeypatch, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(ResourceSpecError, match="min_nodes is 1, but TF_CONFIG names the address of each process's"):
        join_rendezvous(GIVEN, None, lambda: 0, Quorum(1, 60.0))
