"""Functions that `multiprocessing` runs in processes of its own: they join, train, fail and end without a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked_python.start import ON_CPU
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TRAINING = '''
import json, multiprocessing, os, signal, socket, sys, threading
import numpy as np

METHOD, CASES_AND_PORTS = sys.argv[1], sys.argv[2:]


def model():
    import keras
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


def fit(model, *callbacks):
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(32, 4)).astype("float32"), draws.normal(size=(32, 1)).astype("float32")
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def listening():
    """The ports on which this process listens."""
    ports = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.append(copy.getsockname()[1])
        except OSError:
            continue
    return ports


def join(index):
    import autodist
    return autodist.join(strategy="AllReduce", chief=os.environ["CHIEF"], index=index, workers=2)


def train(index):
    """Trains as one of two workers, in a process whose TensorFlow runs already; returns what is left of it."""
    import autodist, keras, tensorflow as tf
    tf.constant(1.0) + 1.0
    with join(index) as ad, ad.scope():
        trained = model()
        weights = fit(trained)
        served = bool(listening())
    after = trained.get_weights()
    alone = fit(model())  # the process is free, and computes what one device does
    for thread in threading.enumerate():
        if thread.name == "autodist-iterator":
            thread.join(90.0)  # TensorFlow takes up to a minute to destroy an iterator
    return {
        "served": served, "listening": listening(),
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("autodist")],
        "difference": max(float(np.abs(one - other).max()) for one, other in zip(weights, alone)),
        "kept": all(np.array_equal(one, other) for one, other in zip(weights, after)),
    }


def train_until_killed(index, victim):
    import keras

    class Killed(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if index == victim and epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with join(index) as ad, ad.scope():
        fit(model(), Killed())


def fail(index):
    with join(index) as ad, ad.scope():
        if index == 1:
            raise KeyError("a column")
        fit(model())


def join_in(text, index):
    """Joins in a function with this text, as if it had been pickled."""
    import autodist
    content = {"autodist": autodist, "address": os.environ["CHIEF"], "index": index, "__name__": "pickled"}
    exec(compile(text, "train.py", "exec"), content)
    content["train"]()


CASES = {
    "train": train,
    "kill chief": lambda index: train_until_killed(index, 0),
    "kill worker": lambda index: train_until_killed(index, 1),
    "fail": fail,
    "differ": lambda index: join_in(
        f"def train():\\n rate = {index}\\n with autodist.join(chief=address, index=index, workers=2): pass", index
    ),
}


def run(case, port, index, results):
    os.environ["CHIEF"] = f"127.0.0.1:{port}"
    try:
        results.put((index, CASES[case](index)))
    except Exception as error:
        results.put((index, error))  # pickled


if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(["autodist.api"])
    for case, port in zip(CASES_AND_PORTS[::2], CASES_AND_PORTS[1::2]):
        results = context.Queue()
        workers = [context.Process(target=run, args=(case, port, index, results)) for index in range(2)]
        for worker in workers:
            worker.start()
        left = {0, 1} - {{"kill chief": 0, "kill worker": 1}.get(case)}
        found = {}
        for _ in left:
            index, result = results.get(timeout=200)
            is_error = isinstance(result, Exception)
            found[index] = [type(result).__name__, str(result)] if is_error else result
        for worker in workers:
            worker.join(60)
        print("FOUND", json.dumps([case, found, [worker.exitcode for worker in workers]]), flush=True)
'''


Ended = tuple[dict[str, Any], list[int]]


def run(directory: Path, method: str, *cases: str) -> dict[str, Ended]:
    """Runs the two functions of each case, in one program; returns their results or errors by index, and exit codes."""
    script = directory / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, str(script), method]
    for case in cases:
        command += [case, str(free_port("127.0.0.1"))]
    done = subprocess.run(
        command, env=os.environ | ON_CPU, cwd=directory, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return {case: (results, codes) for case, results, codes in map(json.loads, lines)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Runs that do not train to the end, in forks of one process that has imported TensorFlow."""
    return run(tmp_path_factory.mktemp("run"), "forkserver", "kill worker", "kill chief", "fail", "differ")


def test_two_functions_train_as_one_device_does_and_leave_their_processes_free(tmp_path: Path) -> None:
    results, codes = run(tmp_path, "spawn", "train")["train"]
    assert codes == [0, 0]
    for index in "01":
        assert results[index].pop("difference") < 1e-6
        assert results[index] == {"served": True, "listening": [], "threads": [], "kept": True}


@pytest.mark.parametrize(
    "victim, error, text",
    [
        ("worker", "WorkerFailedError", "127.0.0.1:1 was lost: its process ended without a report: it was killed"),
        ("chief", "ClusterError", "The chief was lost: its process has ended"),
    ],
)
def test_a_killed_process_is_told_in_the_other_function(
    ended: dict[str, Ended], victim: str, error: str, text: str
) -> None:
    results, codes = ended[f"kill {victim}"]
    assert sorted(codes) == [-9, 0]
    ((kind, message),) = results.values()
    assert kind == error
    assert message.startswith(text)


def test_the_error_of_one_function_is_raised_in_the_other(ended: dict[str, Ended]) -> None:
    results, codes = ended["fail"]
    assert codes == [0, 0]
    assert results["1"] == ["KeyError", "'a column'"]
    kind, message = results["0"]
    assert kind == "WorkerFailedError"
    assert message.startswith(
        "127.0.0.1:1 raised KeyError: 'a column'; the other workers were stopped. Its last lines:"
    )


def test_functions_of_different_code_are_named_in_both(ended: dict[str, Ended]) -> None:
    results, codes = ended["differ"]
    assert codes == [0, 0]
    for index in "01":
        kind, message = results[index]
        assert kind == "ClusterError"
        assert "127.0.0.1:1  the function train (train.py) differs from the one that the chief runs" in message
