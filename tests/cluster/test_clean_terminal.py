"""An ordinary run shows no line of TensorFlow's own log, of the chief or of another worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.trainings import Training
from tests.log_lines import is_log_line

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROUTINE = (
    "W0000 00:00:1795321870.931277   23805 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED: "
    "Cleanup 55963058904290403 [type.googleapis.com/tensorflow.DerivedStatus='']"
)
LOGS = f"""
import ctypes
def log_as_tensorflow():
    # TensorFlow logs this line in some runs only.
    library = ctypes.CDLL(None)
    for line in ({ROUTINE!r}, f"C code of worker {{{{me}}}}"):
        library.fputs(line.encode() + b"\\n", ctypes.c_void_p.in_dll(library, "stderr"))
"""

SCRIPT = """
import keras
keras.config.set_floatx("{floatx}")
v1 = tf.compat.v1
x = np.random.default_rng(0).standard_normal((400, 5)).astype("{floatx}")
y = x.sum(1, keepdims=True)

def check(graph_loss):
    assert np.isfinite(graph_loss), graph_loss

with ad.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    for count in (1, 4):
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=count)
        check(model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"][-1])
    check(model.evaluate(x, y, verbose=0))

    weights = tf.Variable(tf.zeros([5, 1], "{floatx}"))

    @ad.function(batch="global")
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    for _ in range(200):
        loss = step(x[:8], y[:8])
    check(float(loss))
    log_as_tensorflow()
"""

SESSION = """
v1 = tf.compat.v1
x = np.random.default_rng(me).standard_normal((8, 5)).astype("{floatx}")
with tf.Graph().as_default(), ad.scope():
    inputs, weights = v1.placeholder("{floatx}", [None, 5]), v1.get_variable("weights", [5, 1], "{floatx}")
    loss = tf.reduce_mean((inputs @ weights - 1) ** 2)
    train = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
    session = ad.create_distributed_session()
    session.run(v1.global_variables_initializer())
    for _ in range(200):
        _, value = session.run([train, loss], {{inputs: x}})
    assert np.isfinite(value), value
    log_as_tensorflow()
"""


@pytest.mark.parametrize(
    ("script", "floatx"), [(SCRIPT, "float32"), (SESSION, "float64")], ids=["fit and a step", "session"]
)
def test_an_ordinary_run_shows_no_line_of_tensorflow(script: str, floatx: str, tmp_path: Path) -> None:
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}
    with Training(tmp_path, (LOGS + script).format(floatx=floatx), spec) as run:
        assert run.wait(240) == 0, run.stderr
        shown = run.stdout + run.stderr
    assert "first step finished" in shown
    assert all(f"C code of worker {index}" in shown for index in range(2))
    assert [line for line in shown.splitlines() if is_log_line(re.sub(r"^\[\S+\] ", "", line))] == []
