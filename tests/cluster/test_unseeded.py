"""Before training, every worker has the chief's values for all unseeded draws and initial values."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPEC = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

# A fork of a process has a generator of NumPy that was seeded, which AutoDist takes for the script's.
UNSEEDED = """
import numpy as np
np.random.set_bit_generator(np.random.MT19937())
"""

EARLY = """
import random
import keras
unshared = [random.random(), *np.random.normal(size=3)]
early = keras.initializers.GlorotUniform()
"""

SCRIPT = """
drawn = [random.random(), *np.random.normal(size=3)]
x = np.random.normal(size=(12, 3))

with ad.scope():
    first = keras.layers.Dense(4, kernel_initializer=early)
    model = keras.Sequential([keras.Input((3,)), first, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=random.random())
    model.compile(optimizer, keras.losses.Huber(random.uniform(0.1, 2)))
    own = tf.Variable(tf.random.normal([3]))
    taken = tf.Variable(early((2, 2)))

seen = [*model.get_weights(), own.numpy(), taken.numpy(), tf.function(lambda: own * 2.0)().numpy()]
loss = model.evaluate(x, x[:, :1], verbose=0)
model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
keep(unshared=unshared, drawn=drawn, x=x, loss=loss, **{f"seen{k}": one for k, one in enumerate(seen)})
"""

SESSION = """
v1 = tf.compat.v1
with tf.Graph().as_default(), ad.scope():
    x, v = v1.placeholder(tf.float32, [None, 3]), v1.get_variable("v", [3, 1])
    noise = v1.get_variable("noise", initializer=tf.random.normal([2]))
    train = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean((x @ v) ** 2))
    session = ad.create_distributed_session()
    session.run(v1.global_variables_initializer())
    keep(unshared=unshared, v=session.run(v), noise=session.run(noise))
    session.run(train, {x: np.full([4, 3], me + 1.0)})
"""


@pytest.mark.parametrize("script, builder", [(SCRIPT, "AllReduce"), (SESSION, "PS")])
def test_all_workers_draw_and_initialise_alike_before_they_train(tmp_path: Path, script: str, builder: str) -> None:
    with Training(tmp_path, script, {**SPEC, "strategy": {"builder": builder}}, UNSEEDED + EARLY) as run:
        assert run.wait(120) == 0, run.stderr
        assert "different data" not in run.stderr
        chief, other = run.kept(0), run.kept(1)
        assert not set(chief.pop("unshared")) & set(other.pop("unshared"))
        for name, value in chief.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)
        run.assert_gone()


BUILT = """
import gc
gc.freeze = lambda: None  # the tests' own, which would hide earlier objects
import keras
{seed}
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
"""

EVALUATED = """
x, y = np.ones((8, 3)), np.ones((8, 1))
with ad.scope():
    model.compile("adam", "mse")
before = [model.evaluate(x, y, verbose=0) for _ in range(2)]
model.predict(x, verbose=0)
model.fit(x, y, batch_size=4, verbose=0)
keep(before=before, after=model.evaluate(x, y, verbose=0))
"""


@pytest.mark.parametrize("seed, is_told", [("", True), ("keras.utils.set_random_seed(3)", False)])
def test_a_worker_that_evaluates_initial_values_of_its_own_names_them_once(
    tmp_path: Path, seed: str, is_told: bool
) -> None:
    spec = {**SPEC, "strategy": {"builder": "PS"}}
    with Training(tmp_path, EVALUATED, spec, UNSEEDED + BUILT.format(seed=seed)) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
    chief, other = run.kept(0), run.kept(1)
    assert np.array_equal(chief["before"], other["before"]) is not is_told
    assert chief["after"] == other["after"]
    reported = [line for line in run.stderr.splitlines() if "its own initial values" in line]
    assert len(reported) == is_told, run.stderr
    for line in reported:
        assert "[localhost:1]" in line
        assert "evaluate of sequential computes" in line
        assert "sequential/dense/kernel, sequential/dense_1/kernel: they were drawn before AutoDist(...)" in line


SEEDED = """
import random
seen = {"python": random.random(), "numpy": np.random.normal()}
random.seed(3 + me)
np.random.seed(3 + me)
keep(later=[random.random(), np.random.normal()], **seen)
with ad.scope():
    step = training(tf.Variable(np.zeros(3)))
step(np.full([2, 3], me + 1.0))
"""


def test_a_seed_that_the_script_sets_wins_before_autodist_and_after_it(tmp_path: Path) -> None:

    before = "import random, numpy\nrandom.seed(7)\nnumpy.random.seed(8)\n"
    with Training(tmp_path, SEEDED, SPEC, before=before) as run:
        assert run.wait(120) == 0, run.stderr
        found = [run.kept(k) for k in (0, 1)]
    for kept in found:
        assert kept["python"] == random.Random(7).random()
        assert kept["numpy"] == np.random.RandomState(8).normal()
    for k, kept in enumerate(found):
        np.testing.assert_array_equal(
            kept["later"], [random.Random(3 + k).random(), np.random.RandomState(3 + k).normal()]
        )
