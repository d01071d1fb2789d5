"""The threads of a worker's session on a shared machine."""

from __future__ import annotations

import pytest
import tensorflow as tf

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


def test_the_script_s_options_of_the_graph_optimizer_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = workers_of([{"address": "localhost", "cpus": [0]}])
    plain = session_config(alone, 0).graph_options
    options = {"constant_folding": False, "remapping": True, "disable_meta_optimizer": True, "min_graph_nodes": -1}
    monkeypatch.setattr(tf.config.optimizer, "get_experimental_options", lambda: options)
    monkeypatch.setattr(tf.config.optimizer, "get_jit", lambda: "autoclustering")
    changed = session_config(alone, 0).graph_options
    rewrites = changed.rewrite_options
    assert (rewrites.constant_folding, rewrites.remapping) == (2, 1)  # OFF and ON
    assert rewrites.disable_meta_optimizer and rewrites.min_graph_nodes == -1
    assert rewrites.arithmetic_optimization == plain.rewrite_options.arithmetic_optimization
    level = tf.compat.v1.OptimizerOptions
    assert plain.optimizer_options.global_jit_level == level.DEFAULT
    assert changed.optimizer_options.global_jit_level == level.ON_1
