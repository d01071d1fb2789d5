"""`fit` with checkpoints: interrupted at any point, it resumes as if it had not been."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.checkpoint.lock import FolderLock
from autodist.errors import CheckpointError
from autodist.runs.coordination import Coordination
from autodist.strategies import AllReduce, PartitionedPS
from tests.unit.checkpoint.models import SHARDS

X = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
Y = (X @ np.arange(5.0, dtype=np.float32)[:, None]).clip(-2, 2)


class Killed(keras.callbacks.Callback):
    """Ends `fit` before a batch of an epoch, as a kill would."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._at, self._epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, batch) == self._at:
            raise KeyboardInterrupt


class Counting(keras.callbacks.Callback):
    """A callback of a script's own, with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def get_state(self):
        return {"batches": self.batches}

    def set_state(self, state):
        self.batches = state["batches"]


class Wandering(keras.callbacks.Callback):
    """A learning rate that Python's generator draws."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate.assign(random.uniform(0.01, 0.1))


class Augmented(keras.utils.PyDataset):
    """Data that NumPy's generator augments: noise when a batch is read, and the order of the next epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(40)

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = self.order[8 * index : 8 * index + 8]
        return X[rows] + np.random.normal(size=(8, 5)).astype(np.float32), Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def augmented():
    """The same as a generator that goes on over the epochs."""
    while True:
        rows = np.random.permutation(40)[:8]
        yield X[rows] + np.random.normal(size=(8, 5)).astype(np.float32), Y[rows]


def autodist(builder=None, **said) -> AutoDist:
    FolderLock.release_all()
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}], **said})
    return AutoDist(resource_spec=spec, strategy=builder or AllReduce())


def perceptron() -> keras.Model:
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "tanh")])


def without_shapes() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(1, "tanh")])


class Own(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1, "tanh")

    def call(self, x: Any) -> Any:
        return self.head(x)


def build(ad: AutoDist, rate: float = 0.05, make: Callable[[], keras.Model] = perceptron) -> keras.Model:
    keras.utils.set_random_seed(3)
    with ad.scope():
        model = make()
        exact = keras.metrics.MeanAbsoluteError(name="mae", dtype="float64")
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", metrics=[exact])
    return model


def ours(monitor: str = "loss") -> list[keras.callbacks.Callback]:
    return [
        keras.callbacks.ReduceLROnPlateau(monitor, factor=0.5, patience=1, min_delta=0.2),
        keras.callbacks.EarlyStopping(monitor, patience=5, restore_best_weights=True, min_delta=1.0),
        Counting(),
        Wandering(),
    ]


def fit(ad, model, folder, callbacks, *, epochs=4, killed=None, data=None, every_steps=2, **said):
    saving = [ad.checkpoint_callback(folder, every_steps=every_steps)] if every_steps else []
    end = [Killed(*killed)] if killed else []
    if data is None:
        data = X, Y
    of_arrays = isinstance(data, tuple)
    x, y = data if of_arrays else (data, None)
    sizes = {"batch_size": 8} if of_arrays else {"shuffle": said.pop("shuffle", False)}
    try:
        callbacks = [*saving, *callbacks, *end]
        return model.fit(x, y, epochs=epochs, callbacks=callbacks, verbose=0, **sizes, **said).history
    except KeyboardInterrupt:
        if saving and saving[0]._checkpoints:
            saving[0]._checkpoints.wait()
        return None


def values(model: keras.Model) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v).copy() for v in (*model.weights, *model.optimizer.variables)]


def assert_goes_on(folder, builder, *kills, data=lambda: None, monitor="loss", make=perceptron, **said) -> None:
    """A fit that is killed before each of some batches, and every time goes on, ends as one that nothing has ended."""
    ad = autodist(builder())
    whole, expected = build(ad, make=make), ours(monitor)
    history = fit(ad, whole, None, expected, every_steps=None, data=data(), **said)
    for killed in kills:
        ad = autodist(builder())
        assert fit(ad, build(ad, make=make), folder, ours(monitor), killed=killed, data=data(), **said) is None
    ad = autodist(builder())
    model, found = build(ad, make=make), ours(monitor)
    again = fit(ad, model, folder, found, data=data(), **said)
    for one, other in zip(values(model), values(whole), strict=True):
        np.testing.assert_array_equal(one, other)
    # What kernels keep between steps is found by the names of variables, without the number of the model.
    names = [[re.sub(r"_\d+/", "/", v.value.name) for v in one.weights] for one in (model, whole)]
    assert names[0] == names[1]
    assert again == history
    assert found[2].batches == expected[2].batches
    for name in ("wait", "best", "best_epoch", "stopped_epoch"):
        assert getattr(found[1], name) == getattr(expected[1], name), name
    assert found[0].wait == expected[0].wait


def test_it_is_the_uninterrupted_fit_to_the_bit(tmp_path):
    """Values, slots, the learning rate, history with metrics of the epoch, callbacks' states; unshuffled."""
    validated = {"monitor": "val_loss", "validation_data": (X[:8], Y[:8])}
    assert_goes_on(tmp_path, AllReduce, (0, 3), (2, 1), shuffle=False, **validated)


@pytest.mark.parametrize(
    ("make", "data"),
    [(without_shapes, lambda: None), (Own, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))],
)
def test_a_model_that_its_first_step_would_build_goes_on(tmp_path, make, data):
    assert_goes_on(tmp_path, AllReduce, (1, 3), data=data, make=make)


def test_a_model_that_cannot_be_built_without_a_batch_is_refused(tmp_path):
    class Counted(Own):
        def call(self, x: Any) -> Any:
            raise TypeError("it needs a number of rows")

    ad = autodist()
    assert fit(ad, build(ad, make=Own), tmp_path, [], killed=(1, 3)) is None
    ad = autodist()
    with pytest.raises(
        CheckpointError, match=r"(?s)counted is not built, .*it needs a number of rows.*Build it before `fit`"
    ):
        fit(ad, build(ad, make=Counted), tmp_path, [])


@pytest.mark.slow
def test_an_infinite_data_set_goes_on_where_it_was(tmp_path):
    def data():
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()

    assert_goes_on(tmp_path, AllReduce, (3, 1), data=data, steps_per_epoch=3)


@pytest.mark.slow
def test_shuffled_batches_come_in_the_order_that_they_had_to_variables_in_shards(tmp_path):
    """Also if several orders are drawn in an epoch."""

    def data():
        return tf.data.Dataset.from_tensor_slices((X, Y)).take(16).shuffle(16, seed=7).repeat(2).batch(8)

    assert_goes_on(tmp_path, lambda: PartitionedPS(max_shards=3, **SHARDS), (2, 3), data=data)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "said"), [(Augmented, {"shuffle": True}), (augmented, {"steps_per_epoch": 3})])
def test_random_draws_of_python_data_are_repeated(tmp_path, data, said):
    assert_goes_on(tmp_path, AllReduce, (2, 2), data=data, **said)


def test_a_fit_that_was_over_is_not_made_again(tmp_path):
    ad = autodist()
    model = build(ad)
    history = fit(ad, model, tmp_path, ours(), epochs=2)
    before = values(model)
    ad = autodist()
    model = build(ad)
    assert fit(ad, model, tmp_path, ours(), epochs=2) == history
    for one, other in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert ad.steps_done == 10


def test_a_fit_that_was_over_goes_on_with_more_epochs_as_if_they_had_been_requested_at_once(tmp_path):
    def script(folder, epochs):
        ad = autodist()
        model = build(ad)
        history = fit(ad, model, tmp_path / folder, ours(), epochs=epochs, data=Augmented())
        return history, values(model), ad.steps_done

    expected = script("whole", 3)
    script("parts", 1)
    script("parts", 2)
    history, found, steps = script("parts", 3)
    assert (history, steps) == (expected[0], expected[2])
    for one, other in zip(found, expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_fit_that_was_stopped_early_stays_over(tmp_path):
    class Stopping(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    for epochs in (3, 4):
        ad = autodist()
        history = fit(ad, build(ad), tmp_path, [*ours(), Stopping()], epochs=epochs)
        assert len(history["loss"]) == 1
        assert ad.steps_done == 5


@pytest.mark.slow
def test_the_yaml_saves_two_fits_and_what_is_drawn_between_them_with_no_line_of_the_script(tmp_path):
    """For example, the second one trains all layers. The first had ended when the run was killed: nothing of it is
    drawn now; the second shuffles the data drawn between them.
    """

    def script(killed=None):
        ad = autodist(checkpoint={"folder": str(tmp_path / said), "every_steps": 2})
        model = build(ad)
        stopping, counting = keras.callbacks.EarlyStopping("loss", restore_best_weights=True), Counting()
        callbacks = [stopping, counting, Wandering()]
        first = fit(ad, model, None, callbacks, epochs=2, every_steps=None, data=Augmented())
        kept = stopping.best, stopping.best_epoch, counting.batches  # also of objects that are not recreated
        x = X + np.random.normal(size=X.shape).astype(np.float32)
        with ad.scope():
            model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        second = fit(ad, model, None, [], epochs=2, every_steps=None, data=(x, Y), killed=killed)
        ad._keras._models._around_fit._callback._checkpoints.wait()
        return values(model), np.random.normal(size=3).tolist(), first, kept, second

    said = "whole"
    expected = script()
    said = "parts"
    script(killed=(1, 3))
    for _ in range(2):  # the second time after its end
        found = script()
        assert found[1:] == expected[1:]
        for one, other in zip(found[0], expected[0], strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_callback_saves_ordinary_checkpoints(tmp_path):
    ad = autodist()
    model = build(ad)
    fit(ad, model, tmp_path, ours(), epochs=1)
    path = tf.train.latest_checkpoint(str(tmp_path))
    plain = build(AutoDist())
    plain.optimizer.build(plain.trainable_variables)
    root = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer)
    root.read(path).assert_existing_objects_matched()
    for one, other in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    about = json.loads(Path(f"{path}.json").read_text())
    assert about["made_by"] == "fit" and ".callbacks.npz" in about["files"]


def test_what_the_callback_shares_is_not_taken_for_another_call_of_fit(tmp_path, monkeypatch):
    """If the chief alone left its fit by an error, its next call of fit was the answer that a batch waited for."""
    names, share_text = [], Coordination.share_text

    def share_text_and_note(self, text, name, *args, **kwargs):
        names.append(name)
        return share_text(self, text, name, *args, **kwargs)

    monkeypatch.setattr(Coordination, "share_text", share_text_and_note)
    ad = autodist()
    fit(ad, build(ad), tmp_path, [], epochs=1)
    assert set(names) == {"the search for a checkpoint of fit", "a batch of fit"}


def test_another_model_is_not_saved_into_the_folder_of_one(tmp_path):
    ad = autodist()
    callback = ad.checkpoint_callback(tmp_path, every_steps=1)
    build(ad).fit(X, Y, callbacks=[callback], verbose=0)
    with pytest.raises(CheckpointError, match="a folder holds those of one model"):
        build(ad).fit(X, Y, callbacks=[callback], verbose=0)


def test_a_checkpoint_of_the_scripts_own_is_refused(tmp_path):
    ad = autodist()
    model = build(ad)
    ad.checkpoint(tmp_path, model=model, optimizer=model.optimizer).save()
    with pytest.raises(CheckpointError, match="was not saved by a `fit`"):
        fit(ad, model, tmp_path, [])


@pytest.mark.parametrize(
    "asked",
    [{}, {"every_steps": 0}, {"every_minutes": -1}, {"every_minutes": float("nan")}, {"every_steps": 1, "keep": 0}],
)
def test_meaningless_arguments_are_refused(tmp_path, asked):
    with pytest.raises(ValueError):
        autodist().checkpoint_callback(tmp_path, **asked)


def test_an_epoch_of_files_that_are_dealt_out_otherwise_begins_anew(tmp_path, monkeypatch, caplog):
    """The interrupted epoch is trained again from its start; completed epochs are not, and the rest stays the same."""
    dealt = [0, 1]
    monkeypatch.setattr(CheckpointCallback, "_replica_workers", lambda callback: list(dealt))
    ad = autodist()
    steps: list[int] = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(batch))
    assert fit(ad, build(ad), tmp_path, [], killed=(1, 3)) is None
    for now, begins in ((dealt, 1), ([0, 0], 0)):
        dealt = now
        ad, steps[:] = autodist(), []
        with caplog.at_level("WARNING", "autodist"):
            assert fit(ad, build(ad), tmp_path, [counting], every_steps=100, killed=(1, 4)) is None
        assert steps[0] == begins and steps == list(range(begins, 5))
        assert any("the interrupted epoch had reached step 1" in m for m in caplog.messages) == (begins == 0)
