"""The memory that a step needs: its forecast in the log, and the refusal of variables that do not fit."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.cluster import hardware
from autodist.cluster.hardware import MachineMemory
from autodist.errors import StrategyError
from autodist.graph.partial_count import PartialCount
from autodist.runs import memory_needs
from autodist.runs.memory_needs import MemoryNeeds, available_memory, require_memory

TWO_HERE = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}).workers
ON_GPUS = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "gpus": [0, 1]}]}).workers


@pytest.mark.parametrize(
    ("activations", "total", "part"),
    [
        (PartialCount(2_000_000), "a step needs 3.50 MB of 4.00 GB", "2.00 MB for activations"),
        (PartialCount(2_000_000, is_least=True), "a step needs at least 3.50 MB of 4.00 GB", "2.00 MB for"),
        (PartialCount(is_least=True), "a step needs at least 1.50 MB of 4.00 GB", "not known for activations"),
    ],
)
def test_the_needs_are_described_with_their_parts(activations: PartialCount, total: str, part: str) -> None:
    text = MemoryNeeds(1_000_000, 500_000, activations).described(4_000_000_000)
    assert text.startswith(total) and part in text
    assert "1.00 MB for variables" in text and "500 kB for gradients" in text and "layers" not in text


def test_gathered_layers_are_needed_in_place_of_all_gradients() -> None:
    text = MemoryNeeds(1_000_000, 0, PartialCount(0), layers=700_000).described(4_000_000_000)
    assert text.startswith("a step needs 1.70 MB of 4.00 GB") and "700 kB for gathered layers" in text


def test_workers_of_a_machine_share_its_memory_and_a_gpu_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineMemory, "now", lambda: MachineMemory(total=6_000, free=10, swap=2_000))
    assert available_memory(TWO_HERE, 1) == 4_000
    memory_needs._gpu_memory.cache_clear()
    monkeypatch.setattr(memory_needs, "query_gpus", lambda fields, limit: ["16384", "8192"])
    assert available_memory(ON_GPUS, 0) == 8192 * 1024**2
    memory_needs._gpu_memory.cache_clear()
    monkeypatch.setattr(memory_needs, "query_gpus", lambda fields, limit: [])
    assert available_memory(ON_GPUS, 0) == 0
    memory_needs._gpu_memory.cache_clear()


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MachineMemory.now()
    assert 0 < whole.free <= whole.total
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    assert (MachineMemory.now().total, MachineMemory.now().free) == (5000, 3000)


def test_variables_that_do_not_fit_are_refused_and_an_unknown_memory_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_needs, "available_memory", lambda workers, index: 4_000_000)
    require_memory(4_000_000, TWO_HERE, 1)
    with pytest.raises(StrategyError, match=r"localhost:1 needs 4\.10 MB .* has 4\.00 MB of memory.*builder: FSDP"):
        require_memory(4_100_000, TWO_HERE, 1)
    monkeypatch.setattr(memory_needs, "available_memory", lambda workers, index: 0)
    require_memory(4_100_000, TWO_HERE, 1)


def test_a_step_is_forecast_in_the_log_and_refused_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]}))
    with ad.scope():
        weight = tf.Variable(np.zeros((250, 4), np.float32), name="weight")

        @ad.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

        batch = np.ones((8, 250), np.float32)
        monkeypatch.setattr(memory_needs, "available_memory", lambda workers, index: 3_999)
        with (
            caplog.at_level(logging.INFO, logger="autodist"),
            pytest.raises(StrategyError, match=r"needs 4\.00 kB for the variables"),
        ):
            step(batch)
        np.testing.assert_array_equal(weight.numpy(), 0)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory of")]
    assert "4.00 kB for variables" in line and "4.00 kB for gradients" in line and "132 B for activations" in line
