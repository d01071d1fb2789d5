"""Adopted tf_keras models: their functions are traced for one batch, and other workers write nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist import AutoDist, ResourceSpec
from autodist.capture.keras.fits import Fits
from autodist.capture.keras.models import LegacyModels
from autodist.errors import CaptureError, CheckpointError

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def as_ever(train_step: Callable[..., Any], *_: Any) -> Any:
    train_step.traces, train_step.reads_ahead = 1, False  # type: ignore[attr-defined]
    return train_step


def build() -> Any:
    return tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,))])


def two_replicas() -> AutoDist:
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))


def adopted(is_chief: bool, share: Callable[[str, str], str] = lambda said, call: said) -> Any:
    model = build()
    LegacyModels(as_ever, Fits(is_chief, share, lambda: None)).adopt(model)
    model.compile("sgd", "mse", run_eagerly=True)  # else tf.function would trace it with one iterator several times
    return model


def writers(folder: Path) -> list[Any]:
    callbacks = tf_keras.callbacks
    return [
        callbacks.ModelCheckpoint(
            str(folder / "deeper" / "best.keras"), monitor="loss", save_best_only=True, verbose=1
        ),
        callbacks.ModelCheckpoint(str(folder / "all{epoch}"), save_weights_only=True, save_freq=1),
        callbacks.CSVLogger(str(folder / "log.csv")),
        callbacks.TensorBoard(str(folder / "board"), histogram_freq=1, embeddings_freq=1, update_freq=1),
        callbacks.RemoteMonitor("http://127.0.0.1:1"),
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: folder.mkdir(exist_ok=True)),
    ]


def test_another_worker_writes_nothing_and_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = adopted(is_chief=False)
    backup = tf_keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    model.fit(X, Y, epochs=2, callbacks=[*writers(tmp_path), backup])
    model.evaluate(X, Y, callbacks=[tf_keras.callbacks.TensorBoard(str(tmp_path / "evaluated"))])
    model.predict(X)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert capsys.readouterr().out == ""


def test_the_chief_writes_what_callbacks_write(tmp_path: Path) -> None:
    given = [*writers(tmp_path)[:3], tf_keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))]
    adopted(is_chief=True).fit(X, Y, epochs=2, verbose=0, callbacks=given)
    assert {"deeper", "all1.index", "all2.index", "log.csv"} <= {path.name for path in tmp_path.iterdir()}


def test_another_worker_begins_and_ends_with_the_chief() -> None:
    said: list[str] = []

    def share(word: str, call: str) -> str:
        said.append(word)
        epochs = '"initial_epoch"' in word
        return (
            json.dumps({"initial_epoch": [2, 0], "is_restored": False})
            if epochs
            else "true"
            if word == "false"
            else word
        )

    history = adopted(is_chief=False, share=share).fit(X, Y, epochs=6, verbose=0)
    assert history.epoch == [2]
    assert json.loads(said[1]) == {"initial_epoch": [0, 0], "is_restored": False}


def test_models_are_adopted_that_are_imported_and_built_within_the_scope() -> None:
    with two_replicas().scope():
        model = build()
    assert "make_train_function" in vars(model)
    assert "make_train_function" not in vars(build())


def test_a_model_that_is_built_for_a_session_stays_as_it_is() -> None:
    with tf.Graph().as_default(), LegacyModels(as_ever).adopting():
        assert "make_train_function" not in vars(build())


class _TakesTwo(tf_keras.Sequential):  # type: ignore[misc]
    """Adds up the results of two batches, in a custom train function."""

    def make_train_function(self) -> Any:
        def train(batches: Any) -> Any:
            return {"loss": sum(self.train_step(next(batches))["loss"] for _ in range(2))}

        self.train_function = tf.function(train)
        return self.train_function


def test_a_train_function_of_the_scripts_own_that_takes_two_batches_is_refused_by_name() -> None:
    with two_replicas().scope():
        model = _TakesTwo([tf_keras.layers.Dense(2, input_shape=(3,))])
        model.compile("sgd", "mse")
        with pytest.raises(CaptureError, match="_TakesTwo.make_train_function makes takes more than one batch"):
            model.fit(X, Y, batch_size=2, verbose=0)


def test_a_callback_that_saves_fit_of_keras_3_is_refused(tmp_path: Path) -> None:
    ad = two_replicas()
    with ad.scope():
        model = build()
        model.compile("sgd", "mse")
        with pytest.raises(CheckpointError, match="ad.checkpoint_callback cannot save .* tf_keras.callbacks.Backup"):
            model.fit(X, Y, verbose=0, callbacks=[ad.checkpoint_callback(tmp_path, every_steps=1)])
