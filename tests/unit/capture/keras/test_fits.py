"""On workers other than the chief, `fit` follows the chief's decisions, writes no file and shows no progress."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.saving import save_model as save_under_a_name_of_its_own
from keras.src.saving import saving_lib

from autodist.capture.keras.call_arguments import comparable_arguments
from autodist.capture.keras.callbacks import following
from autodist.capture.keras.fits import SHOW_PROGRESS, Fits
from autodist.capture.keras.models import KerasModels
from autodist.errors import ClusterError

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def as_ever(train_step: Callable[..., Any], *_: Any) -> Any:
    train_step.traces = 1  # type: ignore[attr-defined]
    return train_step


class Chief:
    """Replays the chief's messages to another worker; `changes` by the number of the message, -1 for the arguments."""

    def __init__(self, changes: dict[int, Any] | None = None) -> None:
        self._changes = changes or {}
        self.count = -2

    def __call__(self, said: str, call: str) -> str:
        self.count += 1
        return json.dumps(self._changes[self.count]) if self.count in self._changes else said


def models(is_chief: bool, share: Callable[[str, str], str] = lambda said, call: said) -> KerasModels:
    return KerasModels(as_ever, Fits(is_chief, share, lambda: None))


def build() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def adopted(keras_models: KerasModels, net: keras.Model | None = None) -> keras.Model:
    net = net or build()
    keras_models.adopt(net)
    net.compile("sgd", "mse")
    return net


class Board(keras.callbacks.TensorBoard):
    """A script's own subclass, which needs the setup of its base class."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        with self._train_writer.as_default():
            assert self.model is not None


class Log(keras.callbacks.CSVLogger):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.csv_file.flush()


class Saves(keras.callbacks.Callback):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.save(self._folder / "saved.keras")
        self.model.save(self._folder / "saved.h5")
        self.model.save_weights(self._folder / "saved.weights.h5")
        self.model.export(self._folder / "exported", verbose=False)
        save_under_a_name_of_its_own(self.model, self._folder / "by_function.keras")


def writers(folder: Path) -> list[keras.callbacks.Callback]:
    return [
        keras.callbacks.ModelCheckpoint(
            folder / "deeper" / "best.keras", monitor="loss", save_best_only=True, verbose=1
        ),
        keras.callbacks.ModelCheckpoint(str(folder / "all{epoch}.weights.h5"), save_weights_only=True, save_freq=1),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        Log(folder / "more.csv", append=True),
        keras.callbacks.TensorBoard(folder / "board", histogram_freq=1, embeddings_freq=1, update_freq=1),
        Board(folder / "own", profile_batch=1),
        keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
        keras.callbacks.RemoteMonitor("http://127.0.0.1:1"),
    ]


@pytest.mark.parametrize("as_list", [True, False])
def test_another_worker_writes_nothing_and_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_list: bool
) -> None:
    net = adopted(models(is_chief=False))
    given: Any = [*writers(tmp_path), keras.callbacks.ProgbarLogger()]
    if not as_list:
        given = [c for c in given if not isinstance(c, keras.callbacks.TensorBoard)]  # it writes where it is put in
        given = keras.callbacks.CallbackList(given, add_history=True, model=net, verbose=1, epochs=2, steps=1)
    net.fit(X, Y, epochs=2, callbacks=given)
    net.evaluate(X, Y, callbacks=[keras.callbacks.TensorBoard(tmp_path / "evaluated")])
    net.predict(X)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_the_chief_writes_and_shows_as_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), Saves(tmp_path)]
    adopted(models(is_chief=True)).fit(X, Y, epochs=2, callbacks=given)
    names = {"log.csv", "saved.keras", "saved.h5", "saved.weights.h5", "exported", "by_function.keras"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "Epoch 2/2" in capsys.readouterr().out


def test_the_chief_says_once_what_acts_on_it_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autodist")
    net = adopted(models(is_chief=True))
    for _ in range(2):
        given = [
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            Log(tmp_path / "own.csv"),
        ]
        net.fit(X, Y, epochs=2, verbose=0, callbacks=given)
    (said,) = [r.getMessage() for r in caplog.records if "on the chief alone" in r.getMessage()]
    assert said.startswith("CSVLogger, Log: on the chief alone")


def test_outside_of_fit_every_worker_saves(tmp_path: Path) -> None:
    net = adopted(models(is_chief=False))
    net.fit(X, Y)
    net.save(tmp_path / "saved.keras")
    assert (tmp_path / "saved.keras").exists()


def test_keras_and_callbacks_are_as_they_were_after_a_fit(tmp_path: Path) -> None:
    owners = [keras.Model, saving_lib, keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint]
    before = [dict(vars(owner)) for owner in owners]
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None), Saves(tmp_path)
    methods = [{name for name in vars(one) if name.startswith("on_")} for one in own]
    with following(own, lambda: True):
        assert vars(keras.callbacks.BackupAndRestore) != before[2]
        assert "on_epoch_end" in vars(own[1])
    assert [dict(vars(owner)) for owner in owners] == before
    assert [{name for name in vars(one) if name.startswith("on_")} for one in own] == methods


def test_only_the_chief_shows_progress_if_only_fit_is_in_the_scope(capsys: pytest.CaptureFixture[str]) -> None:
    net = build()
    net.compile("sgd", "mse")
    before = [vars(base).get(name) for base in keras.Model.__mro__ for name in SHOW_PROGRESS]
    with models(is_chief=False).adopting():
        net.fit(X, Y)
    assert capsys.readouterr().out == ""
    assert [vars(base).get(name) for base in keras.Model.__mro__ for name in SHOW_PROGRESS] == before


class HandsOn(keras.Sequential):
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)


class Deaf(keras.Sequential):
    def fit(self, x: Any, y: Any) -> Any:
        return super().fit(x, y)


@pytest.mark.parametrize("kind", [HandsOn, Deaf])
def test_a_fit_of_the_script_s_own_is_reached_in_the_scope(
    kind: type[keras.Model], capsys: pytest.CaptureFixture[str]
) -> None:
    chief = Chief()
    with models(False, chief).adopting():
        net = kind([keras.Input((3,)), keras.layers.Dense(2)])
        net.compile("sgd", "mse")
        net.fit(X, Y)
    assert capsys.readouterr().out == ""
    assert chief.count == 3  # the beginning, logs and decision of one epoch, the end: once each


def test_logs_are_the_chiefs_before_any_callback_sees_them() -> None:
    seen = []
    last = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    chief = Chief({1: {"loss": 0.1, "val_loss": float("nan")}, 3: {"loss": 0.3, "other": [1.0, 2.0]}})
    history = adopted(models(False, chief)).fit(X, Y, epochs=2, callbacks=last)
    assert seen == history.history["loss"] == [0.1, 0.3]
    np.testing.assert_array_equal(history.history["other"][0], [1.0, 2.0])


def test_training_stops_where_the_chief_stops() -> None:
    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    stopped = adopted(models(False, Chief({4: True}))).fit(X, Y, epochs=5)
    assert stopped.epoch == [0, 1]
    goes_on = adopted(models(False, Chief({2: False, 4: False}))).fit(X, Y, epochs=2, callbacks=[Stops()])
    assert goes_on.epoch == [0, 1]


def test_early_stopping_and_lower_rates_follow_the_chiefs_losses() -> None:
    chief = Chief({1: {"loss": 1.0}, 3: {"loss": 2.0}, 5: {"loss": 3.0}})
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=2)
    slower = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5)
    net = adopted(models(False, chief))
    rate = float(net.optimizer.learning_rate)
    assert net.fit(X, Y, epochs=9, callbacks=[early, slower]).epoch == [0, 1, 2]
    assert float(net.optimizer.learning_rate) == rate / 4


def test_training_begins_where_the_chief_has_restored() -> None:
    net = adopted(models(False, Chief({0: {"initial_epoch": 3, "is_restored": True}})))
    assigned = []
    plain = net.trainable_variables[0].value.assign
    vars(net.trainable_variables[0].value)["assign"] = lambda *a, **k: (assigned.append(True), plain(*a, **k))[1]
    assert net.fit(X, Y, epochs=5).epoch == [3, 4]
    assert assigned


def test_one_list_of_callbacks_serves_two_fits() -> None:
    chief = Chief()
    net = adopted(models(False, chief))
    given = keras.callbacks.CallbackList([], add_history=True, model=net, verbose=0, epochs=1, steps=1)
    for _ in range(2):
        net.fit(X, Y, callbacks=given)
    assert chief.count == 8  # five words a fit


def test_a_fit_that_is_called_otherwise_than_on_the_chief_is_refused_before_it_reads_anything() -> None:
    said = []
    adopted(models(True, lambda word, call: said.append(word) or word)).fit(X, Y, epochs=2, batch_size=4, verbose=0)
    net = adopted(models(False, lambda word, call: said[0]))
    with pytest.raises(ClusterError, match=r"another value of batch_size here.*\n    chief:  4\n    here:   2"):
        net.fit(X, Y, epochs=2, batch_size=2)


def test_the_first_epoch_is_the_chiefs() -> None:
    begun = adopted(models(True)).fit(X, Y, epochs=4, initial_epoch=2, verbose=0)
    arguments = comparable_arguments({"x": X, "epochs": 4}, True)
    followed = adopted(models(False, Chief({-1: [arguments, 2]}))).fit(X, Y, epochs=4)
    assert followed.epoch == begun.epoch == [2, 3]
    from_zero = adopted(models(False, Chief({-1: [arguments, 0], 0: {"initial_epoch": 0, "is_restored": False}})))
    assert from_zero.fit(X, Y, epochs=4, initial_epoch=3).epoch == [0, 1, 2, 3]
