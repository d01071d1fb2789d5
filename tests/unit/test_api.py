from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.capture.function import capture_function
from autodist.cluster.script_client import ScriptClient
from autodist.errors import ClusterError
from autodist.runs import resolve_config
from autodist.runtime.draws import Draws

KERNEL = ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"]


def spec_of(workers: int) -> ResourceSpec:
    return ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": workers}]})


class AnotherWorker:
    """The part of worker 1 in a run of two that a chief has started."""

    index = 1
    payload = json.dumps(
        {
            "spec": spec_of(2).to_payload(),
            "seed": 1,
            "draws": json.dumps(Draws.now().to_json()),
            "early": {},
            "divides": False,
            "chooses_by_cost": False,
        }
    ).encode()

    def let_chief_fail_first(self, limit: float) -> None:
        """There is no chief."""

    def hold(self) -> None:
        """There is no chief."""

    def wait_for_end(self) -> None:
        """There is no chief."""


def test_other_workers_need_neither_the_yaml_nor_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptClient, "from_environment", staticmethod(AnotherWorker))
    ad = AutoDist("/not/there.yml", strategy="not_installed.Builder")
    assert (ad.worker_index, ad.num_workers, ad.num_replicas) == (1, 2, 2)


def test_several_workers_are_refused_in_a_notebook_and_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", KERNEL)
    with pytest.raises(
        ClusterError, match="ipykernel_launcher runs here.*autodist.launch.*put the code into a file.*or use one worker"
    ):
        AutoDist(resource_spec=spec_of(2))
    assert AutoDist(resource_spec=spec_of(1)).num_replicas == 2


def test_a_training_step_that_reads_the_number_of_replicas_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Scripts of tf.distribute divide each replica's loss by it: the loss was half as large, without a word."""

    def evaluate(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(weight * x) / ad.num_replicas

    def train(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(weight * x) / ad.num_replicas_in_sync / ad.num_replicas / ad.num_workers
        weight.assign_sub(tape.gradient(loss, weight))

    ad = AutoDist(resource_spec=spec_of(1))
    batch = 32 * ad.num_replicas_in_sync
    assert (batch, caplog.text) == (64, "")
    weight, specs = tf.Variable(1.0), (tf.TensorSpec([None], tf.float32),)
    capture_function(evaluate, specs, [0])
    assert caplog.text == ""
    for _ in range(2):
        capture_function(train, specs, [0])
    told = "a training step reads ad.num_replicas (test_api.py:"
    assert [text.startswith(told) and "If it divides the loss by it" in text for text in caplog.messages] == [True]


def test_each_exchange_of_values_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in `ad.gather` took the message of another in `ad.barrier` for its rows."""
    ad = AutoDist(resource_spec=spec_of(1))
    sent = []
    monkeypatch.setattr(ad._run.coordination, "gather_values", lambda value, how: sent.append((value, how)) or [value])
    assert (ad.gather([1]), ad.broadcast(2), ad.barrier()) == ([[1]], 2, None)
    assert sent == [([1], "gather"), (2, "broadcast"), (None, "barrier")]


def test_a_script_whose_steps_are_compared_writes_nothing_and_does_not_wait_for_sigterm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers ignored the first SIGTERM although no worker would have saved."""
    saved = {"checkpoint": {"folder": str(tmp_path), "on_preempt": True}, "metrics": {"folder": str(tmp_path / "m")}}
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]} | saved)
    monkeypatch.setattr(resolve_config, "recorder", lambda: SimpleNamespace(is_reference=False))
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        ad = AutoDist(resource_spec=spec)
        assert ad._run.spec.checkpoint is None  # the coordinator sends it to the workers
        assert ad._run.metrics is None and not (tmp_path / "m").exists()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
