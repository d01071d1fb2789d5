"""Files that all workers save are written by one selected worker; saves nested in such a save are not redirected."""

from __future__ import annotations

import contextlib
import importlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture import shared_files
from autodist.capture.shared_files import (
    saving_alone,
    saving_with_chief,
    share_files,
    share_files_from_now_on,
    writers,
)
from autodist.tf_compat.patches import SAVER_SAVE

# A separate module that replaces tf.saved_model; imported later, it would keep a test's patches.
AGAIN = importlib.import_module("tensorflow.saved_model")
with contextlib.suppress(ImportError):
    importlib.import_module("tf_keras")  # its save functions are redirected once it is imported


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the files to write; names that begin with "other" are written on a worker other than the chief."""
    for row, _ in [*writers(), (SAVER_SAVE, "")]:
        monkeypatch.setattr(row.owner(), row.method, row.plain())
    found: list[str] = []

    def write(what, act):
        found.append(what)
        return None if "other" in what else act()

    share_files(write)
    return found


def test_a_checkpoint_is_asked_for_once_and_the_others_know_its_path(asked, tmp_path):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    assert checkpoint.save(str(tmp_path / "mine")) == str(tmp_path / "mine-1")
    assert checkpoint.write(tmp_path / "other") == str(tmp_path / "other")
    assert [what.partition(" ")[2] for what in asked] == [str(tmp_path / "mine-1"), str(tmp_path / "other")]
    assert tf.train.latest_checkpoint(tmp_path) == str(tmp_path / "mine-1")
    assert not list(tmp_path.glob("other*"))


def test_a_manager_lists_the_checkpoints_that_another_worker_has_written(asked, tmp_path):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path / "other", max_to_keep=2)
    saved = [manager.save() for _ in range(3)]
    assert saved == [str(tmp_path / "other" / f"ckpt-{k}") for k in (1, 2, 3)] and len(asked) == 3
    assert manager.checkpoints == saved[1:] and manager.latest_checkpoint == saved[2]
    assert not [*tmp_path.rglob("*ckpt*"), *tmp_path.rglob("checkpoint")]


def test_models_are_asked_for_unless_this_worker_saves_alone(asked, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(tmp_path / "model.keras")
    model.save_weights(filepath=tmp_path / "other.weights.h5")
    assert len(asked) == 2 and not (tmp_path / "other.weights.h5").exists()
    with saving_alone():
        model.save_weights(tmp_path / "other.weights.h5")
        tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(tmp_path / "other_too"))
    assert len(asked) == 2
    assert (tmp_path / "other.weights.h5").exists() and (tmp_path / "other_too.index").exists()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.weights[0], model.weights[0])
    assert not shared_files._state.is_alone


def test_writes_that_the_chief_may_do_are_noted_and_left_to_it_before_workers_have_met(asked, tmp_path):
    model, left, met = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), [], []
    with saving_with_chief(lambda: bool(met), left.append):
        model.save(tmp_path / "mine.keras")
        met.append(True)
        model.save(tmp_path / "other.keras")
        model.save(tmp_path / "mine.keras")
    assert left == [str(tmp_path / "mine.keras"), str(tmp_path / "other.keras")]
    assert [what.rpartition("/")[2] for what in asked] == ["other.keras", "mine.keras"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.keras"]


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (keras.saving.save_model, "{}.keras"),
        (keras.saving.save_model, "{}.h5"),
        (keras.saving.save_weights, "{}.weights.h5"),
        (lambda model, path: tf.saved_model.save(tf.Module(), path), "{}"),
        (lambda model, path: model.export(path, verbose=False), "{}"),
    ],
)
def test_the_write_of_a_model_is_requested_once(asked, tmp_path, save, name):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for whose in ("mine", "other"):
        save(model, str(tmp_path / name.format(whose)))
    assert [what.partition(" ")[2] for what in asked] == [str(tmp_path / name.format(w)) for w in ("mine", "other")]
    assert (tmp_path / name.format("mine")).exists() and not (tmp_path / name.format("other")).exists()


def test_a_saver_writes_once_and_every_worker_knows_what_there_is(asked, tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("v", initializer=[1.0, 2.0])
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(max_to_keep=2)
        for step in range(3):
            assert saver.save(session, str(tmp_path / "mine"), global_step=step) == str(tmp_path / f"mine-{step}")
        assert saver.save(session, str(tmp_path / "other")) == str(tmp_path / "other")
        assert saver.last_checkpoints == [str(tmp_path / "mine-2"), str(tmp_path / "other")]
    assert [what.partition(" ")[2] for what in asked] == [
        *(str(tmp_path / f"mine-{k}") for k in range(3)),
        saver.last_checkpoints[-1],
    ]
    assert sorted(path.stem for path in tmp_path.glob("*.index")) == ["mine-2"]


def test_writes_by_every_imported_name_are_requested(asked, tmp_path):
    AGAIN.save(tf.Module(), str(tmp_path / "other"))
    tf.compat.v2.saved_model.save(tf.Module(), str(tmp_path / "other2"))
    assert len(asked) == 2 and not list(tmp_path.iterdir())


def test_the_last_who_shares_is_asked_whatever_its_name(asked, tmp_path):
    of_another_run = []
    share_files(lambda what, act: of_another_run.append(what) or act())
    for number, module in enumerate((AGAIN, tf.compat.v2.saved_model)):
        module.save(tf.Module(), str(tmp_path / f"mine{number}"))
    assert len(of_another_run) == 2 and not asked


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (lambda model, path: model.save(path), "{}.keras"),
        (lambda model, path: model.save(path, save_format="h5"), "{}.h5"),
        (lambda model, path: model.save(path), "{}"),
        (lambda model, path: model.save_weights(path), "{}.weights.h5"),
        (lambda model, path: model.save_weights(path), "{}.h5"),
        (lambda model, path: model.export(path), "{}"),
        ("save_model", "{}.keras"),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_the_write_of_a_model_of_keras_2_is_requested_once(asked, tmp_path, save, name):
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential([tf_keras.Input((2,)), tf_keras.layers.Dense(1)])
    for whose in ("mine", "other"):
        act = save if callable(save) else getattr(tf_keras.models, save)
        act(model, str(tmp_path / name.format(whose)))
    assert [what.partition(" ")[2] for what in asked] == [str(tmp_path / name.format(w)) for w in ("mine", "other")]
    assert (tmp_path / name.format("mine")).exists() and not (tmp_path / name.format("other")).exists()


def test_the_write_of_a_model_is_requested_although_keras_2_is_imported_later(asked, monkeypatch, tmp_path):
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential([tf_keras.Input((2,)), tf_keras.layers.Dense(1)])
    monkeypatch.delitem(sys.modules, "tf_keras")
    later: list[str] = []
    share_files_from_now_on(lambda what, act: later.append(what))
    monkeypatch.setitem(sys.modules, "tf_keras", importlib.import_module("tf_keras"))
    model.save_weights(str(tmp_path / "w.h5"))
    assert [what.partition(" ")[2] for what in later] == [str(tmp_path / "w.h5")]
    assert not list(tmp_path.iterdir())


def test_functions_replaced_later_are_wrapped_and_none_twice(asked, monkeypatch):
    write = vars(tf.train.Checkpoint)["_write"]._autodist_writes_by
    before = [row.plain() for row, _ in writers()]
    share_files(write)
    assert [row.plain() for row, _ in writers()] == before
    monkeypatch.setattr(tf.train.Checkpoint, "_write", write_of_its_own := lambda self, file_prefix: None)
    share_files(write)
    assert vars(tf.train.Checkpoint)["_write"].__wrapped__ is write_of_its_own
