"""What all workers save alike is handed to who decides that one writes it; what is saved within that is not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture import shared_files
from autodist.capture.keras_files import SAVES
from autodist.capture.shared_files import saving_models_alone, share_files


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was to be written; on another worker than the chief where it begins with "other"."""
    monkeypatch.setattr(tf.train.Checkpoint, "_write", tf.train.Checkpoint._write)
    for name in SAVES:
        monkeypatch.setattr(keras.Model, name, vars(keras.Model)[name])
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


def test_models_are_asked_for_unless_this_worker_saves_alone(asked, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(tmp_path / "model.keras")
    model.save_weights(filepath=tmp_path / "other.weights.h5")
    assert len(asked) == 2 and not (tmp_path / "other.weights.h5").exists()
    with saving_models_alone():
        model.save_weights(tmp_path / "other.weights.h5")
        tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(tmp_path / "shared"))
    assert len(asked) == 3 and (tmp_path / "other.weights.h5").exists()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.weights[0], model.weights[0])
    assert shared_files._alone() == frozenset()
