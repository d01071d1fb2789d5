"""Ctrl-C at the chief, whose script may catch it: the run ends, and nothing waits forever."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from autodist.cluster.script_client import CONTROL_VARIABLE
from tests.cluster.runs import within
from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START = 60.0

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

TRAIN = """
with ad.scope():
    variable = tf.Variable(np.zeros(3), name="variable")
    step = training(variable)

step(np.ones([2, 3]))
"""

CATCHES = """
try:
    if me == 0:
        note("ready")
    while not has_note("never"):
        step(np.ones([2, 3])) if {steps} or me else time.sleep(0.01)
except KeyboardInterrupt:
    print("caught by", me, variable.numpy().shape)
"""

WAITS = """
if me == 0:
    note("ready")
else:
    wait_for("never", 600)
"""

# It comes between two steps of a fit or a collective evaluation, which the other worker continues.
IN_A_CALL = """
import keras

class Waits(keras.callbacks.Callback):
    def on_train_batch_end(self, number, logs=None):
        if me == 0 and number == 1:
            note("ready")
            time.sleep(600)

    on_test_batch_end = on_train_batch_end

x, y = np.ones((40, 3)), np.ones((40, 1))
with ad.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, y, batch_size=40, verbose=0)
try:
    model.{call}(x, y, batch_size=4, verbose=0, callbacks=[Waits()])
except KeyboardInterrupt:
    print("caught by", me)
model.save_weights(os.path.join(os.path.dirname(__file__), "saved.weights.h5"))
model.evaluate(x, y, verbose=0)
try:
    model.fit(x, y, batch_size=4, verbose=0)
except Exception as error:
    print(type(error).__name__)
"""

# Ctrl-C comes just before the chief's main thread waits: Python only sets a flag, and no system call ends.
JUST_BEFORE = """
import _thread, threading

if me == 0:
    interrupt = threading.Timer(2, _thread.interrupt_main)
    interrupt.daemon = True
    interrupt.start()
    note("ready")
    {wait}
else:
    wait_for("never", 600)
"""

# The handler registered last runs first: the run sees the exception after Python has ignored it.
IN_AN_EXIT_HANDLER = """
if me == 0:
    atexit.register(lambda: note("ready") or time.sleep(600))
else:
    wait_for("never", 600)
"""


@pytest.mark.parametrize(
    ("script", "status", "printed"),
    [
        (CATCHES.format(steps=True), 0, "caught by 0 (3,)"),
        (CATCHES.format(steps=False), 0, "caught by 0 (3,)"),
        (IN_A_CALL.format(call="fit"), 0, "caught by 0\nClusterError"),
        (IN_A_CALL.format(call="evaluate"), 0, "caught by 0\nClusterError"),
        (WAITS, -signal.SIGINT, ""),
        (IN_AN_EXIT_HANDLER, -signal.SIGINT, ""),
    ],
    ids=["in a step", "between steps", "in a fit", "in an evaluation", "at the end", "in an exit handler"],
)
def test_the_run_ends_at_once(tmp_path: Path, script: str, status: int, printed: str) -> None:
    with Training(tmp_path, TRAIN + script, TWO) as run:
        run.wait_for_note("ready", START)
        os.killpg(run.chief.pid, signal.SIGINT)
        assert run.wait(10) == status
        run.assert_gone(10)
    assert "stopping all workers: the chief was interrupted" in run.stderr
    assert run.stdout.strip() == printed


@pytest.mark.parametrize("wait", ["step(np.ones([2, 3]))", "pass"], ids=["in a step", "at the end"])
def test_the_run_ends_if_ctrl_c_came_just_before_a_wait(tmp_path: Path, wait: str) -> None:
    with Training(tmp_path, TRAIN + JUST_BEFORE.format(wait=wait), TWO) as run:
        run.wait_for_note("ready", START)
        assert run.wait(15) == -signal.SIGINT, run.stderr
        run.assert_gone(10)
    assert "stopping all workers: the chief was interrupted" in run.stderr


# The chief of a pipeline waits for the other worker's feed, which never comes.
GATHERS = """
with ad.scope():
    kernels = [tf.Variable(np.ones(shape), name=f"kernel_{k}") for k, shape in enumerate(((4, 3), (3, 2)))]

    @ad.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(rows @ kernels[0]) @ kernels[1])
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels)):
            kernel.assign_sub(gradient)

    step(np.full((4, 4), 1.0 + me))
    if me:
        note("feeds nothing")
        wait_for("never", 600)
    note("gathers")
    step(np.ones((4, 4)))
"""


@pytest.mark.parametrize(
    ("target", "number", "status", "reported"),
    [
        ("gathers", signal.SIGINT, -signal.SIGINT, "stopping all workers: the chief was interrupted"),
        ("feeds nothing", signal.SIGTERM, 1, "localhost:1 was ended by SIGTERM; the other workers were stopped."),
    ],
    ids=["Ctrl-C at the chief", "SIGTERM to the other worker"],
)
def test_while_the_chief_of_a_pipeline_gathers(
    tmp_path: Path, target: str, number: signal.Signals, status: int, reported: str
) -> None:
    spec = TWO | {"strategy": {"builder": "Pipeline", "micro_batches": 2}}
    with Training(tmp_path, GATHERS, spec) as run:
        pids = {note: run.wait_for_note(note, START) for note in ("feeds nothing", "gathers")}
        os.kill(pids[target], number)
        assert run.wait(10) == status, run.stderr
        run.assert_gone(10)
    assert reported in run.stderr


# The other worker has been started, and comes no further; the chief waits for it at its first step.
COMES_NOT = f"""
if {CONTROL_VARIABLE!r} in os.environ:
    note("started")
    wait_for("never", 600)
"""


@contextlib.contextmanager
def machine_that_says_nothing() -> Iterator[tuple[dict[str, object], socket.socket]]:
    """Yields a cluster whose second machine accepts a connection and never answers, and the accepting socket."""
    with socket.create_server(("127.0.0.2", 0)) as listens:
        listens.settimeout(START)
        silent = {"address": "127.0.0.2", "ssh_config": "silent"}
        settings = {"port": listens.getsockname()[1], "host_key_checking": False}
        yield {"nodes": [{"address": "localhost", "chief": True}, silent], "ssh": {"silent": settings}}, listens


PYTHON: list[str] = []
RUN = ["-m", "autodist", "run"]


@pytest.mark.parametrize(("command", "times"), [(PYTHON, 1), (RUN, 2)], ids=["python, once", "autodist run, twice"])
def test_while_machines_are_reached(tmp_path: Path, command: list[str], times: int) -> None:
    with (
        machine_that_says_nothing() as (spec, listens),
        Training(tmp_path, TRAIN, spec, command=command) as run,
        listens.accept()[0],
    ):
        interrupt(run, times)


@pytest.mark.parametrize(("command", "times"), [(RUN, 1), (PYTHON, 2)], ids=["autodist run, once", "python, twice"])
def test_while_workers_join(tmp_path: Path, command: list[str], times: int) -> None:
    with Training(tmp_path, "note('ready')\n" + TRAIN, TWO, COMES_NOT, command) as run:
        run.wait_for_note("started", START)
        run.wait_for_note("ready", START)
        interrupt(run, times)


def interrupt(run: Training, times: int) -> None:
    """Sends Ctrl-C, and again after the first was handled: the run ends at once, without leftovers."""
    for _ in range(times):
        if run.chief.poll() is None:  # else the first has ended it before any output
            os.killpg(run.chief.pid, signal.SIGINT)
        assert within(10, lambda: "Traceback" in run.stderr or run.chief.poll() is not None), run.stderr
    assert run.wait(10) == -signal.SIGINT, run.stderr
    run.assert_gone(10)  # including the relay of standard error during TensorFlow's start
    assert "KeyboardInterrupt" in run.stderr, run.stderr
    # TensorFlow tests attributes by access; an exception handled there at Ctrl-C is printed before it, or named as that
    # which the interrupt has replaced.
    reported = run.stderr.rpartition("During handling of the above exception, another exception occurred:")[2]
    others = re.sub(r"RuntimeError: .* ORIGINAL \w+ REPLACED BY KeyboardInterrupt", "", reported)
    assert "KeyboardInterrupt" in reported and "Error" not in others, run.stderr
