"""Keras callbacks on two workers: only the chief writes and shows, and both train as one device does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TWO = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]}

# Each worker names its files by its index, which shows the writer.
MODEL = """
import keras
folder = {folder!r}
X = np.random.default_rng(1).normal(size=(16, 4))
Y = X @ np.ones((4, 1))

def build():
    keras.utils.set_random_seed(3)
    keras.config.set_floatx("float64")
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])

def weights_of(name, model):
    return {{f"{{name}}{{n}}": value for n, value in enumerate(model.get_weights())}}
"""

FIT = """
class Saves(keras.callbacks.Callback):  # local if the name contains the worker's index, else collective
    def on_epoch_end(self, epoch, logs=None):
        for name in (f"saved{me}", "together"):
            self.model.save(f"{folder}/{name}.keras")
            read = keras.models.load_model(f"{folder}/{name}.keras")
            np.testing.assert_array_equal(read.get_weights()[0], self.model.get_weights()[0])

class Upload(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        note(f"uploaded{me}-{os.path.getsize(self.filepath)}")

class Tracker(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open(f"{folder}/tracked{me}", "a") as file:
            print(logs["loss"], file=file)

Tracker.__module__ = "mlflow.tensorflow.callback"

def callbacks(who):
    return [
        keras.callbacks.ModelCheckpoint(f"{folder}/best{who}.weights.h5", save_best_only=True, save_weights_only=True),
        keras.callbacks.CSVLogger(f"{folder}/log{who}.csv"),
        ad.on_every_worker(keras.callbacks.CSVLogger(f"{folder}/every{who}.csv")),
        keras.callbacks.ReduceLROnPlateau(min_delta=1e9, patience=1),
        keras.callbacks.EarlyStopping(min_delta=1e9, patience=3),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.TerminateOnNaN(),
    ]

def fit(model, callbacks, shift=0.0):
    return model.fit(X, Y, batch_size=8, epochs=9, shuffle=False, validation_data=(X, Y + shift), callbacks=callbacks)

def compiled():
    model = build()
    model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5), "mse")
    return model

both = compiled()
tracks = [Saves(), Upload(f"{folder}/upload{me}.keras"), Tracker()]
with ad.scope():  # the other worker's validation data differ, and its loss always improves
    given = callbacks(me)
    history = fit(both, [*given, *tracks], shift=me * 1e4)
both.load_weights(f"{folder}/best0.weights.h5")  # the chief has written it by now
best = weights_of("best", both)
both.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)

alone = compiled()
if ad.is_chief:
    folder = f"{folder}/alone"
    os.makedirs(folder)
    expected = fit(alone, callbacks("x"))
    alone.load_weights(f"{folder}/bestx.weights.h5")
    alone.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert expected.epoch == history.epoch
    np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], rtol=1e-9)
    best |= weights_of("alone", alone)
best["best"] = given[0].best
keep(val_loss=history.history["val_loss"], rate=both.optimizer.learning_rate.numpy(), epochs=history.epoch, **best,
     **weights_of("both", both))
"""


@pytest.mark.feature("fit", "callbacks: those that write files (`ModelCheckpoint`, `CSVLogger`)")
@pytest.mark.feature("fit", "callbacks: `EarlyStopping`, `ReduceLROnPlateau`")
def test_both_decide_alike_and_the_chief_alone_writes_and_shows(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    with Training(tmp_path / "run", MODEL.format(folder=str(files)) + FIT, TWO) as run:
        assert run.wait(120) == 0, run.stderr
        run.assert_gone()
    everywhere = {"saved0.keras", "saved1.keras", "together.keras", "every0.csv", "every1.csv"}
    on_chief = {"best0.weights.h5", "log0.csv", "upload0.keras", "tracked0", "alone"}
    assert {path.name for path in files.iterdir()} == everywhere | on_chief
    assert len((files / "tracked0").read_text().splitlines()) == 4
    assert {note.name[: len("uploaded0")] for note in (tmp_path / "run/notes").glob("uploaded*")} == {"uploaded0"}
    assert not [line for line in run.stdout.splitlines() if line.startswith("[localhost:1]")]
    assert "Epoch 4/9" in run.stdout
    assert run.stderr.count("CSVLogger, ModelCheckpoint, Tracker, Upload: on the chief alone") == 1
    chief, other = run.kept(0), run.kept(1)
    for name, value in other.items():
        np.testing.assert_array_equal(chief[name], value)
    assert len(chief["epochs"]) == 4
    for number in range(4):
        np.testing.assert_allclose(chief[f"both{number}"], chief[f"alone{number}"], rtol=1e-9)


RESUME = """
with ad.scope():
    model = build()
    model.compile(keras.optimizers.Adam(0.1), "mse")
backup = keras.callbacks.BackupAndRestore(f"{folder}/backup{me}", delete_checkpoint=False)
epochs = []
for last in (4, 5):  # the second resumes in this process; the other worker then has different values
    history = model.fit(X, Y, batch_size=8, epochs=last, shuffle=False, verbose=0, callbacks=[backup])
    epochs += history.epoch
alone = build()
alone.compile(keras.optimizers.Adam(0.1), "mse")
alone.fit(X, Y, batch_size=8, epochs=5, shuffle=False, verbose=0)
keep(epochs=epochs, **weights_of("weight", model), **weights_of("alone", alone))
"""

BEGIN = RESUME.partition("alone =")[0].replace("(4, 5)", "(2,)")


@pytest.mark.feature("fit", "callbacks: `BackupAndRestore`")
def test_a_backup_that_the_chief_alone_has_lets_both_go_on_from_it(tmp_path: Path) -> None:
    model = MODEL.format(folder=str(tmp_path))
    for name, script in (("begin", BEGIN), ("resume", RESUME)):
        with Training(tmp_path / name, model + script, TWO) as run:
            assert run.wait(120) == 0, run.stderr
            run.assert_gone()
    assert not (tmp_path / "backup1").exists()
    for kept in map(run.kept, (0, 1)):
        assert list(kept["epochs"]) == [2, 3, 4]
        for number in range(4):
            np.testing.assert_allclose(kept[f"weight{number}"], kept[f"alone{number}"], rtol=1e-9)
