"""Workers start when AutoDist is created, and reach their first step concurrently with the chief."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.trainings import Training

pytestmark = pytest.mark.processes

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

# Each waits for the other before any step.
BESIDE = """
if me == 0:
    wait_for("worker1")
    note("chief saw the other")
else:
    wait_for("chief saw the other")
with ad.scope():
    variable = tf.Variable(np.zeros(3), name="variable")
    step = training(variable)
losses = [step(np.full([2, 3], me + 1.0)) for _ in range(2)]
keep(losses=losses)
"""


def test_scripts_run_beside_the_chiefs_before_the_first_step(tmp_path: Path) -> None:
    with Training(tmp_path, BESIDE, TWO, is_forked=False) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
    assert list(run.kept(0)["losses"]) == list(run.kept(1)["losses"])
    words = ("started localhost:1", "traced step", "all 2 workers have joined", "first step finished")
    reported = [line for line in run.stderr.splitlines() if " s: " in line and any(word in line for word in words)]
    assert [next(word for word in words if word in line) for line in reported] == list(words), run.stderr


RAISES = """
with ad.scope():
    @ad.function
    def step(x):
        raise ValueError("what all scripts come to")
    step(np.ones([2, 3]))
"""


def test_an_error_that_all_come_to_is_reported_by_the_chief_alone(tmp_path: Path) -> None:
    with Training(tmp_path, RAISES, TWO | {"cause_timeout": 60}) as run:
        assert run.wait(120) == 1, run.stderr
        run.assert_gone()
    assert "[localhost:1]" not in run.stderr
    assert run.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: in user code" in run.stderr and "what all scripts come to" in run.stderr


def test_workers_of_a_script_that_makes_no_step_end_with_it(tmp_path: Path) -> None:
    script = "note(f'at{me}')\nif me == 0:\n    wait_for('at1')\nelse:\n    wait_for('never', 600)\n"
    before = "atexit.register(lambda: note(f'left{me}'))"  # runs last
    with Training(tmp_path, script, TWO, before) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
        assert run.has_note("left1")
    assert "stopping" not in run.stderr and "Traceback" not in run.stderr
