"""The chief's terminal output after a worker's failure: the failure's message comes last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPEC = {"nodes": [{"address": "localhost", "cpus": [0, 1, 2], "workers": 3}]}

STEP = """
import sys
variable = tf.Variable([1.0, 2.0, 3.0])
with ad.scope():
    step = training(variable)
    for number in range(1000):
        if me == 1 and number == 3:
            FAIL
        step(np.ones((6, 3), np.float32))
"""

FIT = """
import keras, sys
with ad.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")

class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, number, logs=None):
        if me == 1 and number == 3:
            FAIL

model.fit(np.ones((6000, 3)), np.ones((6000, 1)), batch_size=6, callbacks=[Fails()], verbose=0)
"""

SESSION = """
import sys
with tf.Graph().as_default(), ad.scope():
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    weights = tf.compat.v1.get_variable("weights", [3])
    loss = tf.reduce_mean(x * weights)
    train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    session = ad.create_distributed_session()
    session.run(tf.compat.v1.global_variables_initializer())
    for number in range(1000):
        if me == 1 and number == 3:
            FAIL
        session.run(train, {x: np.ones((6, 3))})
"""

RAISES = 'raise RuntimeError("the cause")'
IS_KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    "script, fail",
    [
        pytest.param(FIT, RAISES, id="fit raises"),
        pytest.param(SESSION, RAISES, id="session raises"),
        pytest.param(STEP, IS_KILLED, id="step is killed"),
    ],
)
def test_message_is_the_last_that_is_read(tmp_path: Path, script: str, fail: str) -> None:
    with Training(tmp_path, script.replace("FAIL", fail), SPEC) as run:
        assert run.wait(120) == 1
        run.assert_gone(0)
    said = run.stderr
    if fail == RAISES:
        headline = "localhost:1 ended with exit status 1; the other workers were stopped."
        assert said.rstrip().endswith("\n    RuntimeError: the cause"), said
        assert said.rindex(headline) > said.rindex("Traceback (most recent call last):\n  File")
    else:
        headline = "localhost:1 was ended by SIGKILL; the other workers were stopped."
        assert said.rstrip().endswith(headline), said
    assert f"autodist: {headline}\n" in said  # at once, at any point of the chief's script
    assert "errors_impl" not in said, said  # neither on the chief nor on the third worker
    assert "The above exception" not in said
    assert "During handling" not in said


READS = """
records = [str(number) for number in range(600)]
records[14] = "torn"  # of the third batch, and worker 1's

def read(record):
    return tf.fill([3], tf.strings.to_number(record))

with ad.scope():
    variable = tf.Variable([1.0, 2.0, 3.0])
step = training(variable)
batches = iter(ad.distribute_dataset(tf.data.Dataset.from_tensor_slices(records).map(read).batch(6)))
for number in range(100):
    try:
        x = next(batches)
    except tf.errors.InvalidArgumentError:
        if not SURVIVES:
            raise
        x = np.ones((2, 3), np.float32)
    step(x)
"""


@pytest.mark.parametrize("survives", [False, True])
def test_a_record_that_one_worker_alone_cannot_read_ends_the_run(tmp_path: Path, survives: bool) -> None:
    """Also if the worker's script substitutes another value, while the others train on their parts of the batch."""
    with Training(tmp_path, READS.replace("SURVIVES", str(survives)), SPEC) as run:
        assert run.wait(120) == 1
        run.assert_gone(0)
    said = run.stderr
    ending = "failed in a step (InvalidArgumentError: " if survives else "ended with exit status 1; "
    assert f"autodist: localhost:1 {ending}" in said, said
    assert "could not correctly convert string: torn" in said[said.rindex(f"localhost:1 {ending}") :], said
    assert ("and its script went on; the other workers were stopped" in said) is survives, said


HELD = """
with ad.scope():
    variable = tf.Variable([1.0, 2.0, 3.0])
step = training(variable)
for number in range(100):
    if me == 1 and number == 2:
        import threading, time
        threading.Thread(target=time.sleep, args=(1000,), name="reader").start()
        raise ValueError("bad")
    step(np.ones((2, 3), np.float32))
"""


def test_a_worker_whose_process_stays_after_an_exception_ends_the_run(tmp_path: Path) -> None:
    """Python waits for a thread of the script, for ever, before any exit handler."""
    with Training(tmp_path, HELD, SPEC) as run:
        assert run.wait(120) == 1
        run.assert_gone(0)
    headline = "localhost:1 has ended its script by an exception (ValueError: bad), but not its process, which waits "
    assert f"autodist: {headline}for its thread reader" in run.stderr, run.stderr
