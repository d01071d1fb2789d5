"""Scripts that end after all steps, and scripts whose failure shows only in the exit status."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.runs import within
from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START, ENDS = 60.0, 40.0

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

TRAIN = """
with ad.scope():
    variable = tf.Variable(np.zeros(3), name="variable")
    step = training(variable)

step(np.ones([2, 3]))
"""

# The handler registered first runs last. `me` is not defined yet.
LINGERS = """
atexit.register(lambda: note(f"left{me}"))

def linger():
    note(f"lingers{me}")
    if me:
        wait_for("go", 600)

atexit.register(linger)
"""


@pytest.mark.busy
def test_a_worker_whose_exit_handlers_take_long_is_waited_for(tmp_path: Path) -> None:
    with Training(tmp_path, TRAIN, TWO, LINGERS) as run:
        said = "localhost:1: the script is done, its process (exit handlers, threads) is not; waiting for up to 300 s"
        assert within(START + ENDS, lambda: said in run.stderr), run.stderr
        assert not run.has_note("lingers0")
        run.note("go")
        assert run.wait(ENDS) == 0
        run.assert_gone(0)
        assert run.has_note("left1") and run.has_note("left0")
    assert "is stopped" not in run.stderr


def test_a_worker_that_is_done_and_does_not_end_is_stopped_with_a_warning(tmp_path: Path) -> None:
    with Training(tmp_path, TRAIN, TWO | {"end_timeout": 1}, LINGERS) as run:
        assert run.wait(START + ENDS) == 0
        run.assert_gone(0)
        assert run.has_note("left1") and run.has_note("left0")
    assert "localhost:1: the script is done, but its process did not end within 1 s, and is stopped." in run.stderr
    assert "Raise `end_timeout`" in run.stderr


def test_what_a_worker_dies_of_when_it_is_done_is_no_failure(tmp_path: Path) -> None:
    before = """
def crash():
    if me:
        note("crashes")
        os.kill(os.getpid(), signal.SIGSEGV)

atexit.register(crash)
atexit.register(lambda: 1 / 0)
"""
    with Training(tmp_path, TRAIN, TWO, before) as run:
        assert run.wait(START + ENDS) == 0
        run.assert_gone(0)
        assert run.has_note("crashes")
    assert "localhost:1 was done; then its process was ended by SIGSEGV" in run.stderr


@pytest.mark.parametrize("then", ["", "for _ in range(3): step(np.ones([2, 3]))"], ids=["at the end", "among steps"])
def test_an_exit_status_that_a_worker_chooses_is_a_failure(tmp_path: Path, then: str) -> None:
    before = "atexit.register(lambda: note('handled'))"
    with Training(tmp_path, f"{TRAIN}if me: raise SystemExit(3)\n{then}", TWO, before) as run:
        assert run.wait(START + ENDS) == 1
        run.assert_gone(0)
        assert run.has_note("handled")
    assert "localhost:1 ended with exit status 3" in run.stderr


def test_all_threads_that_wait_in_steps_are_reported_a_worker_that_died_and_so_does_the_status(tmp_path: Path) -> None:
    script = """
import threading

def work(number):
    wait_for("go")
    try:
        while True:
            step(np.ones([2, 3]))
            note("stepped")
    finally:
        note(f"told{number}")

threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
if me:
    note("waits")
    wait_for("never", 600)
else:
    for thread in threads:
        thread.start()
    note("started")
    for thread in threads:
        thread.join()
"""
    with Training(tmp_path, TRAIN + script, TWO) as run:
        run.wait_for_note("started", START)
        worker = run.wait_for_note("waits", START)
        run.note("go")
        os.kill(worker, signal.SIGKILL)
        assert run.wait(ENDS) == 1
        run.assert_gone()
        assert [run.has_note(f"told{number}") for number in range(3)] == [True] * 3
    assert run.stderr.count("WorkerFailedError: localhost:1 was ended by SIGKILL") >= 3


@pytest.mark.parametrize("catches", [False, True])
def test_a_worker_that_dies_while_the_chief_is_busy_shows_in_its_status(tmp_path: Path, catches: bool) -> None:
    script = """
if me:
    note("waits")
    wait_for("never", 600)
wait_for("told")
if {catches}:
    try:
        step(np.ones([2, 3]))
    except Exception as error:
        print("caught", type(error).__name__)
"""
    with Training(tmp_path, TRAIN + script.format(catches=catches), TWO) as run:
        os.kill(run.wait_for_note("waits", START), signal.SIGKILL)
        assert within(ENDS, lambda: "localhost:1 was ended by SIGKILL" in run.stderr)
        run.note("told")
        assert run.wait(ENDS) == 1
        run.assert_gone()
    assert run.stdout == ("caught WorkerFailedError\n" if catches else "")


# Python aborts a process if a thread returns from TensorFlow while it ends.
LEAVES_NONE_IN_TENSORFLOW = """
import sys, threading

def tell_of_threads():
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        while frame is not None and "session.py" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            note(f"in TensorFlow: {names.get(ident)}")
    note(f"left{me}")

atexit.register(tell_of_threads)
"""

FAILS = """
if me == 0:
    atexit.register(lambda: print("reads", variable.numpy().sum()))
    raise ValueError("the chief fails")
step(np.ones([2, 3]))
"""


def test_no_thread_is_left_in_tensorflow_where_the_chief_fails(tmp_path: Path) -> None:
    with Training(tmp_path, TRAIN + FAILS, TWO, LEAVES_NONE_IN_TENSORFLOW) as run:
        assert run.wait(START) == 1
        run.assert_gone()
        assert run.has_note("left0") and run.has_note("left1")
        assert not list(run.directory.glob("notes/in TensorFlow*"))
    assert "reads -1.5" in run.stdout and "ValueError: the chief fails" in run.stderr
