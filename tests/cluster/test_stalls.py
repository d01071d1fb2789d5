"""Workers that wait for an event that never comes: the run ends and reports the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.runs import halt, within
from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START, STALLED = 60.0, 40.0

# Limits of seconds in place of minutes.
TWO = {
    "nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}],
    "stall_timeout": 2,
    "answer_timeout": 3,
    "deadlock_timeout": 4,
}

TRAIN = """
with ad.scope():
    first, second = (tf.Variable(np.zeros(3), name=name) for name in ("first", "second"))
    step, other = training(first), training(second)

batch = np.ones([2, 3])
step(batch)
"""


def ended(tmp_path: Path, script: str) -> str:
    """Returns the output of a run that cannot continue; checks that it fails and leaves no processes."""
    with Training(tmp_path, TRAIN + script, TWO) as run:
        assert run.wait(START + STALLED) != 0
        run.assert_gone()
        return run.stderr


def test_a_worker_that_makes_fewer_steps(tmp_path: Path) -> None:
    said = ended(tmp_path, "for _ in range(3 - me): step(batch)\n")
    assert "localhost:1 has ended its script, and localhost:0 waits for it in a further step" in said
    assert "check that each has the same number of batches" in said


def test_a_chief_that_makes_fewer_steps(tmp_path: Path) -> None:
    said = ended(tmp_path, "for _ in range(3 + me): step(batch)\n")
    assert "localhost:1 waits in a step for localhost:0, whose script has ended" in said


def test_a_worker_that_was_stopped_on_its_way_to_its_first_step(tmp_path: Path) -> None:
    before = "if 'AUTODIST_CONTROL' in os.environ: os.kill(os.getpid(), signal.SIGSTOP)\n"
    with Training(tmp_path, TRAIN, TWO, before) as run:
        assert run.wait(START + STALLED) != 0
        assert (
            "localhost:1 has not answered for 3 s, while localhost:0 waits for it: its process was stopped"
            in run.stderr
        )
        run.assert_gone()


def test_a_worker_that_was_stopped_between_making_a_session_and_its_first_run(tmp_path: Path) -> None:
    script = """
with tf.Graph().as_default(), ad.scope():
    x = tf.compat.v1.placeholder(tf.float64, [None, 3])
    w = tf.compat.v1.get_variable("w", initializer=np.zeros(3))
    train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(x * w))
    session = ad.create_distributed_session()
    if me:
        os.kill(os.getpid(), signal.SIGSTOP)
    session.run(train, {x: np.ones([2, 3])})
"""
    with Training(tmp_path, script, TWO) as run:
        assert run.wait(START + STALLED) != 0
        assert "localhost:1 has not answered for 3 s, while localhost:0 waits for it" in run.stderr
        run.assert_gone()


def test_a_worker_that_was_stopped_after_its_last_step(tmp_path: Path) -> None:
    """The chief closes its connections to it, which does not end, and waits for it at the end of its own script."""
    said = ended(tmp_path, "step(batch)\nif me: os.kill(os.getpid(), signal.SIGSTOP)\n")
    assert "localhost:1 has not answered for 3 s, while localhost:0 waits for it: its process was stopped" in said


@pytest.mark.busy
def test_a_worker_that_was_stopped_and_before_its_first_step_let_nothing_else_of_it_run(tmp_path: Path) -> None:
    holds = "import ctypes\nif me: ctypes.PyDLL(None).sleep(5)\n"  # longer than it may take to answer later
    script = "note(f'stepped{me}')\nwait_for('go')\nstep(batch)\n"
    with Training(tmp_path, holds + TRAIN + script, TWO) as run:
        worker = run.wait_for_note("stepped1", START)
        halt(worker)
        run.note("go")
        assert run.wait(STALLED) != 0
        assert (
            "localhost:1 has not answered for 3 s, while localhost:0 waits for it: its process was stopped"
            in run.stderr
        )
        run.assert_gone()


def test_a_worker_that_is_busy_elsewhere_is_named_and_waited_for_and_one_in_another_step_ends_the_run(
    tmp_path: Path,
) -> None:
    script = """
if me:
    wait_for("go")
step(batch)
note(f"ended{me}")
other(batch); step(batch)
(step if me else other)(batch)
"""
    with Training(tmp_path, TRAIN + script, TWO) as run:
        said = "for workers that are outside of any step: localhost:1"
        assert within(START, lambda: said in run.stderr), run.stderr
        assert not run.has_note("ended0")
        run.note("go")
        for worker in (0, 1):
            run.wait_for_note(f"ended{worker}", STALLED)
        assert run.wait(STALLED) != 0
        run.assert_gone()
        assert "localhost:1 and all others have waited for one another" in run.stderr
