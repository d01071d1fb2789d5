"""`keras.distribution` on two workers: `DataParallel` and `ModelParallel` train as one device does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.trainings import Training

v1 = tf.compat.v1

pytestmark = pytest.mark.processes

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 2}]}
START = 60.0


def fit() -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.default_rng(1).normal(size=(13, 4))
    model.fit(x, x @ np.ones((4, 1)), batch_size=5, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


MODEL = "import keras\nfrom keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel\n"
MODEL += inspect.getsource(fit)


def test_data_parallel_trains_as_one_device_on_the_places_of_the_run(tmp_path: Path) -> None:
    script = (
        MODEL
        + """
with ad.scope():
    keras.distribution.set_distribution(DataParallel(DeviceMesh((4,), ["batch"])))
    keep(**{f"w{k}": value for k, value in enumerate(fit())}, devices=keras.distribution.list_devices())
"""
    )
    floatx = keras.config.floatx()
    expected = fit()
    keras.config.set_floatx(floatx)
    with Training(tmp_path, script, TWO) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        for worker in range(2):
            kept = run.kept(worker)
            assert kept.pop("devices").tolist() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
            for k, value in enumerate(expected):
                np.testing.assert_allclose(kept[f"w{k}"], value, rtol=1e-9)


def transformer() -> dict[str, np.ndarray]:
    """Trains, evaluates and predicts with a language model of one block."""
    keras.utils.set_random_seed(3)
    keras.config.set_floatx("float64")
    ids = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(12, 8, name="embed")(ids)
    y = keras.layers.MultiHeadAttention(2, 4, name="att", flash_attention=False)(x, x, use_causal_mask=True)
    x = keras.layers.LayerNormalization()(keras.layers.Add()([x, y]))
    y = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, "gelu", name="up")(x))
    model = keras.Model(ids, keras.layers.Dense(12, name="head")(keras.layers.Add()([x, y])))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss, metrics=["accuracy"])
    x, labels = np.random.default_rng(1).integers(0, 12, (2, 13, 5)).astype("int32")
    fitted = model.fit(
        x,
        labels,
        batch_size=4,
        epochs=2,
        validation_data=(x, labels),
        validation_batch_size=5,
        shuffle=False,
        verbose=0,
    )
    results = {key: np.asarray(values) for key, values in fitted.history.items()}
    results |= {"evaluated": np.asarray(model.evaluate(x, labels, batch_size=4, verbose=0))}
    results |= {"predicted": model.predict(x, batch_size=5, verbose=0)}
    return results | {f"weight_{k}": value for k, value in enumerate(model.get_weights())}


@pytest.fixture(scope="module")
def transformed() -> dict[str, np.ndarray]:
    """Returns the numbers of one device."""
    floatx = keras.config.floatx()
    expected = transformer()
    keras.config.set_floatx(floatx)
    return expected


LAYOUTS = """
import autodist, keras
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel
layouts = LayoutMap(DeviceMesh({shape}, ["batch", "model"]))
layouts["embed/embeddings"] = ("batch", None)
layouts["att/(query|key|value)/kernel"] = ("batch", "model", None)
layouts["att/attention_output/kernel"] = ("model", None, None)
layouts["up/kernel"] = (None, "model")
layouts["down/kernel"] = ("model", "batch")
layouts["head/kernel"] = (None, "model")
layouts["up/output"] = ("batch", None, "model")
keras.distribution.set_distribution(ModelParallel(layout_map=layouts, batch_dim_name="batch"))
"""


@pytest.mark.feature("fit", "step: `keras.distribution.ModelParallel`")
@pytest.mark.parametrize(("shape", "workers"), [((2, 2), 4), ((1, 2), 1)])
def test_model_parallel_trains_evaluates_and_predicts_as_one_device(
    tmp_path: Path, transformed: dict[str, np.ndarray], shape: tuple[int, int], workers: int
) -> None:
    script = "import keras\n" + inspect.getsource(transformer) + "\nwith ad.scope():\n    keep(**transformer())\n"
    spec = {"nodes": [{"address": "localhost", "cpus": list(range(shape[0] * shape[1])), "workers": workers}]}
    with Training(tmp_path, script, spec, before=LAYOUTS.format(shape=shape)) as run:
        assert run.wait(2 * START) == 0, run.stderr
        run.assert_gone()
        run.assert_kept(workers, transformed)
    assert f"mesh {{batch: {shape[0]}, model: {shape[1]}}}" in run.stderr
    assert "matches no" not in run.stderr


def trained_in(session_of: Callable[[], v1.Session]) -> dict[str, np.ndarray]:
    """Trains two layers in a session of the default graph."""
    x = np.random.default_rng(1).normal(size=(13, 8))
    given = hidden = v1.placeholder(tf.float64, [None, 8])
    for name, shape in {"up/kernel": (8, 6), "down/kernel": (6, 8)}.items():
        initial = np.cos(np.arange(48.0)).reshape(shape)
        hidden = tf.tanh(hidden @ v1.get_variable(name, initializer=initial, use_resource=True))
    loss = tf.reduce_mean(tf.square(hidden))
    train = v1.train.AdamOptimizer(0.01).minimize(loss)
    session = session_of()
    session.run(v1.global_variables_initializer())
    losses = [session.run([loss, train], {given: x[:rows]})[0] for rows in (13, 6, 1)]
    values = session.run(v1.trainable_variables())
    return {"losses": np.asarray(losses), "up": values[0], "down": values[1]}


def test_model_parallel_divides_the_variables_of_a_session(tmp_path: Path) -> None:
    script = (
        "from collections.abc import Callable\nimport tensorflow as tf\nv1 = tf.compat.v1\n"
        + inspect.getsource(trained_in)
        + "\nwith tf.Graph().as_default(), ad.scope():\n    keep(**trained_in(ad.create_distributed_session))\n"
    )
    with tf.Graph().as_default():
        expected = trained_in(v1.Session)
    with Training(tmp_path, script, TWO | {"batch": "global"}, before=LAYOUTS.format(shape=(2, 2))) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        run.assert_kept(2, expected)
    assert re.search(r"\[–, model\] +│ the layout-map key 'up/kernel'", run.stderr), run.stderr
    assert re.search(r"\[model, batch\] +│ the layout-map key 'down/kernel'", run.stderr), run.stderr


@pytest.mark.parametrize("shape, cause", [((1, 4), "after AutoDist"), ((2, 4), "has 8 places, and the run has")])
def test_model_parallel_set_in_the_scope_ends_both_workers_before_any_training_with_one_cause(
    tmp_path: Path, shape: tuple[int, int], cause: str
) -> None:
    script = (
        MODEL
        + f"""
layouts = LayoutMap(DeviceMesh({shape}, ["batch", "model"]))
layouts[".*kernel"] = (None, "model")
with ad.scope():
    note(f"scope{{me}}")
    wait_for(f"scope{{1 - me}}")
    keras.distribution.set_distribution(ModelParallel(layout_map=layouts))
    fit()
    note("trained")
"""
    )
    with Training(tmp_path, script, TWO) as run:
        assert run.wait(START) == 1, run.stderr
        run.assert_gone()
    assert not (tmp_path / "notes" / "trained").exists()
    assert "StrategyError: " in run.stderr and cause in run.stderr, run.stderr
    causes = {line.partition("StrategyError: ")[2] for line in run.stderr.splitlines() if "StrategyError: " in line}
    assert len(causes) == 1, run.stderr


def test_a_worker_that_alone_predicts_with_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    script = """
import keras
import autodist.runs.gathered_reads, autodist.runs.run
from autodist.errors import StrategyError

with ad.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    model.fit(x, np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    autodist.runs.gathered_reads.NOTED = 1  # small values are checked, too
    autodist.runs.run.available_memory = lambda workers, index: 100  # the kernel has 128 B
    together = model.predict(x, verbose=0)
    try:
        model.predict(x, verbose=0) if ad.is_chief else None
        refused = ""
    except StrategyError as error:
        refused = str(error)
    keep(together=together, refused=refused, layout=str([ad.layout(one) for one in model.trainable_variables]))
"""
    layouts = {".*/up/kernel": {"sharding": [None, "model"]}}
    strategy = {"builder": "Mesh", "mesh": {"model": 2}, "variables": layouts}
    machines = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "strategy": strategy}
    with Training(tmp_path, script, machines) as run:
        assert run.wait(START) == 0, run.stderr
        run.assert_gone()
        assert run.kept(1)["together"].shape == run.kept(0)["together"].shape == (8, 1)
        assert run.kept(1)["refused"] == ""
        divided = "[(None, 'model'), ('model',), ('model', None), (None,)]"
        assert run.kept(0)["layout"] == run.kept(1)["layout"] == divided
        assert "gathers 128 B that other workers hold" in str(run.kept(0)["refused"])
