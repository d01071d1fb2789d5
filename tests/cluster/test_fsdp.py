"""FSDP on real processes: `fit` with callbacks, and functions with checkpoints, have the numbers of one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def fit(_: object, folder: str) -> dict[str, Any]:
    """Trains with a validation, callbacks that read and write weights, and weights that are loaded again."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(13, 8)(ids)
    for k in range(2):
        x = keras.layers.Add()([x, keras.layers.Dense(8, "gelu", name=f"dense_{k}")(x)])
    model = keras.Model(ids, keras.layers.Dense(13, name="head")(keras.layers.BatchNormalization(synchronized=True)(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.02, global_clipnorm=0.5, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"])
    x, labels = np.random.default_rng(1).integers(0, 13, (2, 17, 6)).astype("int32")
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True, min_delta=0.5),
        keras.callbacks.ModelCheckpoint(f"{folder}/best.weights.h5", save_best_only=True, save_weights_only=True),
        keras.callbacks.SwapEMAWeights(),
    ]
    fitted = model.fit(
        x,
        labels,
        batch_size=5,
        epochs=3,
        validation_data=(x[:9], labels[:9]),
        validation_batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    results = {name: np.asarray(values) for name, values in fitted.history.items()}
    results |= {"predicted": model.predict(x, batch_size=5, verbose=0), "called": np.asarray(model(x[:3]))}
    results |= {f"slot_{k}": np.asarray(variable) for k, variable in enumerate(optimizer.variables)}
    model.load_weights(f"{folder}/best.weights.h5")
    results |= {"loaded": np.asarray(model.evaluate(x, labels, batch_size=4, verbose=0))}
    model.fit(x, labels, batch_size=5, shuffle=False, verbose=0)
    return results | {f"weight_{k}": value for k, value in enumerate(model.get_weights())}


def function(ad: Any, folder: str) -> dict[str, Any]:
    """Trains by a function, changes the weights between two steps, and restores a checkpoint of TensorFlow."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6, "tanh", name=f"layer_{k}") for k in range(5)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = keras.optimizers.AdamW(0.02)
    optimizer.build(model.trainable_variables)
    count = tf.Variable(0, dtype=tf.int64)
    wrapped = tf.function if ad is None else ad.function(batch="global")

    @wrapped
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - tf.sin(x)))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        count.assign_add(1)
        return loss

    @wrapped
    def evaluate(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=False) - tf.sin(x)))

    x = np.random.default_rng(1).normal(size=(9, 6))
    losses = [float(step(x[:n])) for n in (8, 7, 3)] + [float(evaluate(x))]
    for variable in model.trainable_variables:
        variable.assign(0.9 * variable)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, count=count)
    path = checkpoint.save(f"{folder}/checkpoint")
    losses += [float(step(x))]
    checkpoint.restore(path)
    losses += [float(step(x)), float(step(x[:4])), float(evaluate(x))]
    weights = {f"weight_{k}": value for k, value in enumerate(model.get_weights())}
    return weights | {"losses": np.asarray(losses), "count": count.numpy()}


SCRIPT = """
from typing import Any
import keras
{source}
keras.config.set_floatx("float64")
with ad.scope():
    keep(**{name}(ad, {folder!r}))
"""


@pytest.fixture
def float64() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("train", "workers", "prefetch"), [(fit, 3, 0), (function, 2, 1)])
def test_training_on_several_workers_has_the_numbers_of_one_device(
    tmp_path: Path, train: Callable[[Any, str], dict[str, Any]], workers: int, prefetch: int
) -> None:
    expected = train(None, str(tmp_path))
    strategy = {"builder": "FSDP", "prefetch": prefetch, "min_partition_bytes": 1}
    spec = {
        "nodes": [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}],
        "strategy": strategy,
    }
    script = SCRIPT.format(source=inspect.getsource(train), name=train.__name__, folder=str(tmp_path / "files"))
    with Training(tmp_path / "run", script, spec) as run:
        assert run.wait(240) == 0, run.stderr
        run.assert_gone()
        run.assert_kept(workers, expected)


MEMORY = """
import ctypes
import keras

WIDTH, LAYERS = 768, 12
HAS_POOL = os.environ["TF_CPU_ALLOCATOR_USE_BFC"] == "true"
LAYER = 4 * WIDTH * WIDTH * 4  # bytes

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

c = ctypes.CDLL(None)
c.mallopt(-3, 1 << 20)  # the mapping threshold, which else grows with the blocks that were freed before the fork
c.mallinfo2.restype = Counts

def mapped():  # bytes of blocks that are large enough to have a mapping of their own
    gc.collect()
    c.malloc_trim(0)
    return c.mallinfo2().hblkhd

def pooled(key):  # bytes of the pool's tensors, those in queues included, and what their places are larger
    return tf.config.experimental.get_memory_info("CPU:0")[key]

def resident(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) << 10

class Block(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.up = keras.layers.Dense(2 * WIDTH, "relu", use_bias=False)
        self.down = keras.layers.Dense(WIDTH, use_bias=False)

    def call(self, x):
        return x + self.down(self.up(x))

class Measure(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.held, self.before = mapped() - at_start, resident("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # the peak from now on
        if HAS_POOL:
            self.held = pooled("current")
            tf.config.experimental.reset_memory_stats("CPU:0")

    def on_epoch_end(self, epoch, logs=None):
        self.peak = pooled("peak") - self.held if HAS_POOL else resident("VmHWM") - self.before

at_start = mapped()
with ad.scope():
    x = inputs = keras.Input((WIDTH,))
    for k in range(LAYERS):
        x = Block(name=f"block_{k}")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), "mse", jit_compile=False)
    measure = Measure()
    x = np.zeros((64, WIDTH), "float32")
    model.fit(x, x[:, :1], batch_size=32, epochs=2, verbose=0, callbacks=[measure])
    keep(held=measure.held / (2 * LAYERS * LAYER), peak=measure.peak / LAYER)  # a slot is as large as its parameter
"""


@pytest.mark.parametrize(("prefetch", "layers", "has_pool"), [(0, 8, False), (1, 12, False), (1, 12, True)])
def test_a_worker_holds_its_shards_of_parameters_and_slots_and_a_step_needs_a_few_layers_more(
    tmp_path: Path, prefetch: int, layers: int, has_pool: bool
) -> None:
    spec = {
        "nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}],
        "strategy": {"builder": "FSDP", "prefetch": prefetch},
    }
    # oneDNN keeps copies of weights.
    environment = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": str(has_pool).lower()}
    with Training(tmp_path / "run", MEMORY, spec, f"os.environ.update({environment})") as run:
        assert run.wait(240) == 0, run.stderr
        run.assert_gone()
        figures = [run.kept(worker) for worker in range(2)]
    # In a pool, the place of a tensor may be larger than the tensor; in all, a worker needs no more memory.
    state = 2 * 12  # parameters and slots, in layers
    limits = [1 / 2 + 0.02 + (layers - kept["peak"]) / state if has_pool else 1 / 2 + 0.02 for kept in figures]
    assert all(kept["held"] <= limit for kept, limit in zip(figures, limits, strict=True)), figures
    # On a busy machine, an epoch may begin while a worker still allocates its state, which is then part of the peak.
    allowed = [layers + state * max(0.0, 1 / 2 - kept["held"]) for kept in figures]
    assert all(kept["peak"] <= most for kept, most in zip(figures, allowed, strict=True)), figures
