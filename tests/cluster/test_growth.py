"""Runs that start again with a machine that is back, or that was added to the YAML file."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.hosts import LoopbackHosts
from tests.cluster.runs import MARK, within
from tests.cluster.trainings import SINES, Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START = 60.0

# Each start on one worker trains until the run ends it; one on two workers makes three steps.
GROWS = (
    SINES
    + """
start = next(n for n in range(9) if not has_note(f"start{n}.{me}"))
note(f"start{start}.{me}")
atexit.register(lambda: note(f"left{start}.{me}"))

begun = number = ad.steps_done
until = number + 3 if ad.num_workers > 1 else 10**9
variable, step = made("variable")
while number < until:
    step(batch(number))
    number += 1
    note(f"made{start}.{me}")
keep(values=variable.numpy(), expected=trained(number), workers=ad.num_workers, begun=begun, pid=os.getpid())
"""
)


def saving(folder: Path) -> dict[str, Any]:
    return {"checkpoint": {"folder": str(folder), "every_steps": 10**6}, "min_nodes": 1, "rejoin_interval": 0.3}


def assert_grew(run: Training, reason: str, tolerance: float = 1e-12) -> None:
    """Checks that the run made its last steps on two workers, and has the values of one that had both."""
    kept, reported = run.kept(0), run.stderr
    assert (kept["workers"], kept["pid"]) == (2, run.chief.pid)
    np.testing.assert_allclose(kept["values"], kept["expected"], rtol=tolerance)
    begun = int(kept["begun"])
    assert begun > 0
    expected = (
        f"all workers start again from the checkpoint of step {begun}, on 2 workers instead of 1, since {reason} "
        "(which `max_restarts` does not limit)."
    )
    assert reported.count(expected) == 1, reported


@pytest.mark.ssh
def test_a_machine_that_was_away_joins_once_its_versions_are_those_of_the_chief(tmp_path: Path) -> None:
    other = tmp_path / "packages" / "tensorflow-2.18.99.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.18.99\n")
    mark = secrets.token_hex(8)
    environment = {MARK: mark, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(other.parent)}
    (tmp_path / "hosts").mkdir()
    with LoopbackHosts(tmp_path / "hosts", 1, environment) as hosts:
        (host,) = hosts.hosts
        hosts.stop(host)
        spec = hosts.spec(cpus=[0]) | saving(tmp_path / "saved") | {"connect_timeout": 2}
        with Training(tmp_path / "run", GROWS, spec, mark=mark) as run:
            run.wait_for_note("made1.0", START)
            hosts.start(host)
            log = hosts.directory / f"{host.group}.log"
            assert within(START, lambda: log.read_text().count("Accepted publickey") >= 3), run.stderr
            assert run.chief.poll() is None and not run.has_note("left1.0")
            (other / "METADATA").unlink()
            other.rmdir()
            assert run.wait(3 * START) == 0, run.stderr
            run.assert_gone()
            reported = run.stderr
            first = reported.index("all workers start again")
            assert_grew(run, f"{host.address} is back")
    assert f"no answer: {host.address} is left out (`min_nodes` is 1), and the run starts from" in reported
    refused = f"{host.address} is left out: it is there, but cannot be used: TensorFlow is 2.18.99, on the chief "
    assert reported.count(refused) == 1 and reported.index(refused) < first, reported


FIT = """
import keras
start = next(n for n in range(9) if not has_note(f"start{n}.{me}"))
note(f"start{start}.{me}")
atexit.register(lambda: note(f"left{start}.{me}"))

class Adds(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if me == 0 and start == 0 and batch == 3 and not has_note("added"):
            note("added")
            os.rename("added.yml", "cluster.yml")
        if me == 1 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)

rng = np.random.default_rng(1)
x, y = rng.normal(size=(32, 4)), rng.normal(size=(32, 1))
with ad.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.01), "mse")
begun = ad.steps_done
epochs = 10**9 if ad.num_workers == 1 else begun // 4 + 2
model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, validation_data=(x, y), callbacks=[Adds()])
expected = np.zeros((4, 1))
for number in range(4 * epochs):
    rows = slice(8 * (number % 4), 8 * (number % 4) + 8)
    expected -= 0.01 * 2 / 8 * x[rows].T @ (x[rows] @ expected - y[rows])
keep(values=model.get_weights()[0], expected=expected, workers=ad.num_workers, begun=begun, start=start,
     pid=os.getpid())
"""


def test_a_machine_that_is_added_to_the_file_dies_at_once_and_joins_a_fit_when_it_is_back(tmp_path: Path) -> None:
    nodes = [{"address": "127.0.0.1", "chief": True}]
    added = {"nodes": [*nodes, {"address": "127.0.0.2"}]} | saving(tmp_path / "saved")
    run = Training(tmp_path / "fit", FIT, {"nodes": nodes} | saving(tmp_path / "saved"))
    (run.directory / "added.yml").write_text(json.dumps(added))
    with run:
        assert run.wait(4 * START) == 0, run.stderr
        run.assert_gone()
        assert run.kept(0)["start"] == 3
        assert run.has_note("left0.0"), "the exit handlers of the first start have run"
        assert_grew(run, "127.0.0.2 is back", 1e-4)
        reported = run.stderr
    added_to = f"on 2 workers instead of 1, since 127.0.0.2 is new in {run.directory / 'cluster.yml'} (which"
    assert reported.count(added_to) == 1, reported
    before, _, after = reported.partition(added_to)
    assert "Traceback" not in before + after.partition("It is tried again later.")[2], reported
    assert reported.count("the run goes on without 127.0.0.2 from the checkpoint of step ") == 1, reported
    assert "127.0.0.2 was ended by SIGKILL. It is tried again later." in reported
