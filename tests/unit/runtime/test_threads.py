"""The threads of a worker's session on a shared machine."""

from __future__ import annotations

import pytest

from autodist.resources import ResourceSpec
from autodist.runtime.threads import COLLECTIVE_LEADER, session_config


def workers_of(nodes: list[dict[str, object]]) -> list:
    return list(ResourceSpec.from_dict({"nodes": nodes}).workers)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.parametrize(("cpus", "of_one_operation"), [([0], 8), ([0, 1], 4)])
def test_the_cores_are_shared_out_among_the_replicas(cpus: list[int], of_one_operation: int) -> None:
    config = session_config(workers_of([{"address": "localhost", "cpus": cpus}]), 0)
    assert config.intra_op_parallelism_threads == of_one_operation
    assert config.inter_op_parallelism_threads == 8
    assert not config.experimental.collective_group_leader


def test_workers_of_one_machine_share_its_cores_and_know_whom_collectives_ask() -> None:
    config = session_config(workers_of([{"address": "localhost", "cpus": [0, 1], "workers": 2}]), 1)
    assert (config.intra_op_parallelism_threads, config.inter_op_parallelism_threads) == (4, 4)
    assert config.experimental.collective_group_leader == COLLECTIVE_LEADER


def test_threads_without_work_sleep_at_once() -> None:
    config = session_config(workers_of([{"address": "localhost", "cpus": [0]}]), 0)
    assert config.experimental.disable_thread_spinning
