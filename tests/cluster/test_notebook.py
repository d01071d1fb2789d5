"""A notebook kernel whose cells train on several workers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from tests.cluster.runs import MARK, Chief, survivors, within
from tests.forked_python.becoming import CHAINS
from tests.forked_python.start import ON_CPU, forked_python

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LIMIT = 290.0

LAUNCHES = 9
"""Of all tests of the file, at most."""

SETUP = """
import os
import sys
import time
import autodist
import numpy as np
import tensorflow as tf

def note(what):
    open(os.path.join({notes!r}, what), "w").close()

def wait_for(what):
    while not os.path.exists(os.path.join({notes!r}, what)):
        time.sleep(0.01)

size = tf.constant(3, tf.float64)

def train(ad, steps):
    with ad.scope():
        weight = tf.Variable(np.arange(3.0), name="weight")

        @ad.function(batch="global")
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, weight) - 1))
            gradient = tape.gradient(loss, weight)
            if tf.reduce_sum(weight) > size:  # AutoGraph reads the source of this
                gradient *= 0.5
            weight.assign_sub(0.05 * gradient)
            return loss

    data = np.random.default_rng(5)
    for _ in range(steps):
        step(data.normal(size=(8, 3)))
    assert not (ad.is_chief and sys.stdout.write_through)  # its lines are whole, other workers' come between them
    print("made by", ad.worker_index)
    wait_for("seen")
    return weight.numpy(), ad.num_workers
"""


class Kernel:
    """A kernel, and a notebook that runs cells in it.

    Attributes:
        of_a_run: how many processes there are beforehand that become those of the next run of two workers.
    """

    of_a_run = 0

    def __init__(self, directory: Path) -> None:
        self.notes = directory / "notes"
        self.notes.mkdir()
        self.mark = secrets.token_hex(8)
        own = {MARK: self.mark, "IPYTHONDIR": str(directory / "ipython"), "PYTHONUNBUFFERED": "1"}
        file, key = str(directory / "kernel.json"), secrets.token_hex(16).encode()
        write_connection_file(file, key=key)
        line, environment = ["-m", "ipykernel_launcher", "-f", file], os.environ | ON_CPU | own
        self._process = self._start(line, environment, directory)
        self._client = BlockingKernelClient(connection_file=file)
        self._client.load_connection_file()
        self._client.start_channels()
        self._client.kernel_info(reply=True, timeout=LIMIT)
        assert within(LIMIT, self._client.is_alive)
        self._client.wait_for_ready(timeout=LIMIT)

    def _start(self, line: list[str], environment: dict[str, str], directory: Path) -> Chief:
        """A process that has imported TensorFlow already, and so have those that its cells launch."""
        with open(os.devnull, "r+b") as nothing:
            streams = nothing, nothing, nothing
            forked = forked_python.start(line, streams, environment, directory, LAUNCHES, "launch")
            if forked is not None:
                self.of_a_run = len(CHAINS["launch"])
                return forked
            command = [sys.executable, *line]
            about: dict[str, Any] = {"env": environment, "cwd": directory, "start_new_session": True}
            return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, **about)

    def run(self, cell: str, on_output: Callable[[str], None] = lambda shown: None) -> tuple[str, str]:
        """Returns the output of a cell, and its traceback if it raises. Calls `on_output` with all output so far."""
        request, shown, error = self.begin(cell), "", ""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                message = self._client.get_iopub_msg(timeout=1.0)
                content: dict[str, Any] = message["content"]
                if message["parent_header"].get("msg_id") != request:
                    continue
                if message["msg_type"] == "stream":
                    shown += content["text"]
                    on_output(shown)
                elif message["msg_type"] == "error":
                    error = "\n".join(content["traceback"])
                elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                    return shown, error
        raise AssertionError(f"the cell still runs:\n{shown}")

    def begin(self, cell: str) -> str:
        # A kernel skips cells queued after a failed one, unless configured otherwise.
        return self._client.execute(cell, stop_on_error=False)

    def interrupt(self) -> None:
        os.killpg(self.pid, signal.SIGINT)  # as Jupyter does

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._client.stop_channels()
        self._process.kill()
        self._process.wait()
        for pid in survivors(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    one = Kernel(tmp_path_factory.mktemp("notebook"))
    assert one.run(SETUP.format(notes=str(one.notes))) == ("", "")
    yield one
    one.end()


def on_one_device(steps: int) -> np.ndarray:
    weight, data = np.arange(3.0), np.random.default_rng(5)
    for _ in range(steps):
        x = data.normal(size=(8, 3))
        gradient = 2 * x.T @ (x @ weight - 1) / 8
        weight = weight - 0.05 * gradient * (0.5 if weight.sum() > 3 else 1.0)
    return weight


def test_a_function_of_a_cell_trains_and_what_it_returns_comes_back(kernel: Kernel) -> None:
    def see(shown: str) -> None:
        if "made by 0" in shown and "[localhost:1] made by 1" in shown:  # while they wait to be seen
            (kernel.notes / "seen").touch()

    shown, error = kernel.run("weight, workers = autodist.launch(train, 4, workers=2)", see)
    assert not error
    assert "all 2 workers have joined" in shown
    shown, error = kernel.run("print(type(weight).__name__, workers, *map(float.hex, weight.tolist()))")
    kind, workers, *values = shown.split()
    assert (kind, workers, error) == ("ndarray", "2", "")
    found = np.array([float.fromhex(value) for value in values])
    np.testing.assert_allclose(found, on_one_device(4), rtol=1e-13)


def test_what_several_workers_cannot_do_in_a_kernel_is_refused_at_once(kernel: Kernel) -> None:
    two = "autodist.ResourceSpec.from_dict({'nodes': [{'address': 'localhost', 'cpus': [0, 1], 'workers': 2}]})"
    _, error = kernel.run(f"autodist.AutoDist(resource_spec={two})")
    assert "This process is a notebook's kernel" in error
    assert "autodist.launch(function, workers=2)" in error
    _, error = kernel.run("data = tf.data.Dataset.range(3)\nautodist.launch(lambda ad: list(data), workers=2)")
    assert "<lambda> → data, a _RangeDataset, cannot go to another process" in error


MODEL = """
import keras
keras.config.set_floatx("float64")  # required on the workers, too
x = np.random.default_rng(0).normal(size=(32, 3))
y = x.sum(1, keepdims=True)
layers = [keras.layers.Dense(n, "tanh", kernel_initializer=keras.initializers.GlorotUniform(n)) for n in (2, 1)]
model = keras.Sequential([keras.Input((3,)), *layers])
alone = keras.models.clone_model(model)
alone.set_weights(model.get_weights())
for one in (model, alone):
    one.compile(keras.optimizers.Adam(0.01), "mse")

def fit(ad):
    with ad.scope():
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model
"""


def test_the_notebooks_own_model_is_trained_and_trained_again(kernel: Kernel) -> None:
    assert not kernel.run(MODEL)[1]
    for _ in range(2):
        assert not kernel.run("model = autodist.launch(fit, workers=2)")[1]
        kernel.run("alone.fit(x, y, batch_size=8, shuffle=False, verbose=0)")
    _, error = kernel.run(
        "for mine, of_one in zip(model.get_weights(), alone.get_weights(), strict=True):\n"
        "    np.testing.assert_allclose(mine, of_one, rtol=1e-13)\n"
        "assert model.optimizer.iterations.numpy() == 8"
    )
    assert not error


def test_a_cell_is_a_script_that_takes_and_leaves_names(kernel: Kernel) -> None:
    kernel.run("%load_ext autodist\nstart = 2.0\nother = 1")
    cell = "%%autodist --workers 2 --in start,tf --out end,who\n"
    cell += "end = float(ad.reduce(tf.constant(start) * (1 + ad.worker_index), 'sum'))\nwho = ad.worker_index"
    assert not kernel.run(cell)[1]
    assert kernel.run("print(end, who)") == ("6.0 0\n", "")
    _, error = kernel.run("%%autodist\nif ad.is_chief:\n    print(other)")
    assert "NameError" in error
    assert "--in other copies it" in error
    assert "print(other)" in error  # the line of the cell


def test_the_example_trains_and_trains_on(kernel: Kernel) -> None:
    folder = Path(__file__).parents[2] / "examples"
    kernel.run(f"%cd -q {folder}")
    cells = json.loads((folder / "digits_notebook.ipynb").read_text())["cells"]
    shown = ""
    for cell in cells:
        if cell["cell_type"] == "code":
            more, error = kernel.run("".join(cell["source"]))
            assert not error
            shown += more
    found = re.search(r"test accuracy (\S+)", shown)
    assert found
    assert float(found[1]) >= 0.95
    assert "Epoch 2/2" in shown.partition("test accuracy")[2]


def test_an_interrupt_ends_the_run_and_the_death_of_the_kernel_does(kernel: Kernel) -> None:
    waits = "def wait(ad, what):\n    ad.reduce(1)\n    note(what)\n    wait_for('never')"
    assert kernel.run(waits) == ("", "")
    others = set(survivors(kernel.mark))

    def interrupt(shown: str) -> None:
        if "ready" in shown and not (kernel.notes / "interrupted").exists():
            (kernel.notes / "interrupted").touch()
            kernel.interrupt()

    cell = "def say(ad):\n    ad.reduce(1)\n    print('ready') if ad.is_chief else None\n    wait_for('never')\n"
    _, error = kernel.run(f"{cell}autodist.launch(say, workers=2)", interrupt)
    assert "KeyboardInterrupt" in error
    left = set(survivors(kernel.mark))  # when the cell has ended
    assert left <= others
    assert len(others - left) == kernel.of_a_run
    kernel.begin("autodist.launch(wait, 'waits', workers=2)")
    assert within(LIMIT, (kernel.notes / "waits").exists)
    os.kill(kernel.pid, signal.SIGKILL)
    assert within(10, lambda: not set(survivors(kernel.mark)) - {kernel.pid})
