"""Callbacks that record run only on the chief, and files that other workers save and read back exist there."""

from __future__ import annotations

import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from autodist.capture.keras import callbacks
from autodist.capture.keras.callbacks import acts_on_chief_alone, following, on_every_worker
from autodist.capture.shared_files import saving_alone, share_files, writers
from autodist.errors import ClusterError
from autodist.tf_compat.patches import SAVER_SAVE
from autodist.versions import has_package
from tests.unit.capture.keras.test_fits import Chief, X, Y, adopted, models


class Counts(keras.callbacks.Callback):
    calls = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls += 1


class OfTracker(Counts):
    """Stands in a tracker's package."""


OfTracker.__module__ = "wandb.integration.keras.callbacks.metrics_logger"


class OwnOfTracker(OfTracker):
    """A script's own, which derives from a tracker's."""


class Upload(keras.callbacks.ModelCheckpoint):
    """Reads the files that it has saved."""

    sizes: tuple[int, ...] = ()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.sizes = (*self.sizes, Path(self.filepath).stat().st_size)


class SavesAndReads(keras.callbacks.Callback):
    """None of Keras's, for which it saves and reads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.read, self.begun = path, 0, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.begun += 1
        self.model.save(self.path)
        keras.models.load_model(self.path)
        self.read += 1


@pytest.mark.parametrize(
    "callback, acts_alone",
    [
        (keras.callbacks.ModelCheckpoint("model.keras"), True),
        (Upload("model.keras"), True),
        (keras.callbacks.CSVLogger("log.csv"), True),
        (keras.callbacks.TensorBoard("board"), True),
        (keras.callbacks.RemoteMonitor(), True),
        (OwnOfTracker(), True),
        (on_every_worker(OwnOfTracker()), False),
        (keras.callbacks.BackupAndRestore("backup"), False),
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.SwapEMAWeights(), False),
        (Counts(), False),
    ],
)
def test_recording_callbacks_act_on_the_chief_and_those_that_may_change_training_everywhere(
    callback: keras.callbacks.Callback, acts_alone: bool
) -> None:
    assert acts_on_chief_alone(callback) is acts_alone


@pytest.mark.parametrize("is_chief, calls", [(True, [2, 2, 2]), (False, [0, 2, 2])])
def test_a_tracker_is_called_on_the_chief_and_elsewhere_if_the_script_says_so(is_chief: bool, calls: list[int]) -> None:
    given = [OwnOfTracker(), on_every_worker(OwnOfTracker()), Counts()]
    net = adopted(models(is_chief))
    net.fit(X, Y, epochs=2, verbose=0, callbacks=given)
    net.evaluate(X, Y, verbose=0, callbacks=given)
    assert [one.calls for one in given] == calls
    assert all(one.model is net for one in given)


def test_one_that_reads_what_it_saved_is_called_on_the_chief_and_not_elsewhere(tmp_path: Path) -> None:
    uploads = []
    for is_chief in (True, False):
        uploads.append(Upload(tmp_path / f"{is_chief}.keras", monitor="loss"))
        adopted(models(is_chief)).fit(X, Y, epochs=2, verbose=0, callbacks=[uploads[-1]])
    assert [len(one.sizes) for one in uploads] == [2, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["True.keras"]


def test_the_numbers_that_one_keeps_on_the_chief_are_there_on_the_others_when_fit_returns(tmp_path: Path) -> None:
    first, second = (keras.callbacks.ModelCheckpoint(tmp_path / f"{k}.keras", monitor="loss") for k in (1, 2))
    chiefs = {"ModelCheckpoint 1": {"best": 0.25}, "ModelCheckpoint 2": {"best": 0.5, "_last_batch_seen": 3}}
    net = adopted(models(False, Chief({3: chiefs})))
    net.fit(X, Y, callbacks=[first, second])
    assert (first.best, second.best, second._last_batch_seen) == (0.25, 0.5, 3)


# -- saves of other workers ------------------------------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Simulates files: the chief writes those with "chief" in the name; names with "away" are on another worker's own
    disk.
    """
    for row, _ in [*writers(), (SAVER_SAVE, "")]:
        monkeypatch.setattr(row.owner(), row.method, row.plain())
    joined = [True]

    def write(what: str, act: Callable[[], Any]) -> Any:
        if "chief" not in what:
            return act()
        if "away" not in what:
            with saving_alone():
                keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save(what.partition(" ")[2])
        return None

    share_files(write)
    return joined


def saving(path: Path, joined: list[bool]) -> SavesAndReads:
    callback, net = SavesAndReads(path), keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    net.compile("sgd", "mse")
    with following([callback], lambda: joined[0]):
        net.fit(X, Y, epochs=3, verbose=0, callbacks=[callback])
    return callback


@pytest.mark.parametrize("name", ["own.keras", "chief.keras"])
def test_another_worker_reads_files_that_it_saves_by_its_own_name_or_with_the_chief(
    shared: list[bool], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    callback = saving(tmp_path / name, shared)
    assert (callback.begun, callback.read) == (3, 3)
    assert not [record for record in caplog.records if record.name == "autodist"]


@pytest.mark.parametrize("has_joined", [True, False])
def test_one_that_misses_the_chiefs_file_on_this_machine_is_told_and_left_to_the_chief(
    shared: list[bool], tmp_path: Path, caplog: pytest.LogCaptureFixture, has_joined: bool
) -> None:
    shared[0] = has_joined
    callback = saving(tmp_path / "away_chief.keras", shared)
    assert (callback.begun, callback.read) == (1, 0)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "autodist"]
    assert said.startswith("SavesAndReads failed with ValueError: File not found")
    assert "SavesAndReads acts on the chief alone from now on" in said


@pytest.mark.parametrize("error", [ClusterError("lost"), ZeroDivisionError()])
def test_other_errors_of_callbacks_are_raised(shared: list[bool], tmp_path: Path, error: Exception) -> None:
    class Fails(SavesAndReads):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.save(self.path)
            raise error

    name = "away_chief.keras" if isinstance(error, ClusterError) else "chief.keras"
    callback, net = Fails(tmp_path / name), keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    net.compile("sgd", "mse")
    with pytest.raises(type(error)), following([callback], lambda: True):
        net.fit(X, Y, verbose=0, callbacks=[callback])


# -- mlflow's autologging --------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Its autologging puts a function of its own in the place of `fit`, which begins a run; returns the runs."""
    runs: list[str] = []
    is_off = [False]
    autologging: Any = types.ModuleType("mlflow.utils.autologging_utils")

    @contextmanager
    def disable_autologging() -> Iterator[None]:
        is_off[0] = True
        try:
            yield
        finally:
            is_off[0] = False

    autologging.disable_autologging = disable_autologging
    autologging.autologging_is_disabled = lambda flavor: is_off[0] or flavor != "tensorflow"
    monkeypatch.setitem(sys.modules, "mlflow.utils.autologging_utils", autologging)
    plain = keras.Model.fit

    def fit(self: keras.Model, *args: Any, callbacks: Any = (), **kwargs: Any) -> Any:
        if is_off[0]:
            return plain(self, *args, callbacks=callbacks, **kwargs)
        runs.append("run")
        return plain(self, *args, callbacks=[*callbacks, OwnOfTracker()], **kwargs)

    monkeypatch.setattr(keras.Model, "fit", fit)
    return runs


@pytest.mark.parametrize("is_chief", [True, False])
def test_mlflow_logs_by_itself_on_the_chief_alone(
    mlflow: list[str], is_chief: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "autodist")
    adopted(models(is_chief)).fit(X, Y, verbose=0)
    assert len(mlflow) == is_chief
    said = [record.getMessage() for record in caplog.records]
    assert any(one.startswith("mlflow's autologging: on the chief alone") for one in said) is is_chief


def test_autologging_that_begins_after_compile_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    net = adopted(models(is_chief=True))
    plain, seen = keras.Model.fit, []
    monkeypatch.setattr(keras.Model, "fit", lambda self, *a, **k: (seen.append(self), plain(self, *a, **k))[1])
    ran = OwnOfTracker()
    net.fit(X, Y, None, 1, 0, [ran])  # by place
    assert seen == [net] and ran.calls == 1
    assert list(inspect.signature(net.fit).parameters)[:2] == ["x", "y"]


def test_a_version_of_keras_need_not_have_each_callback_that_records() -> None:
    missing = set() if has_package("keras", "3.14") else {"OrbaxCheckpoint"}
    assert callbacks.RECORDERS - set(dir(keras.callbacks)) == missing
    assert "callbacks.Orbax" not in Path(callbacks.__file__).read_text()
    np.testing.assert_equal(acts_on_chief_alone(object()), False)
