"""`ad.checkpoint`: another strategy and plain TensorFlow resume from it; checkpoints that do not fit are rejected."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint.lock import FolderLock
from autodist.errors import CheckpointError, CheckpointMismatchError
from autodist.strategies import (
    FSDP,
    PS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    ShardedAllReduce,
    UnevenPartitionedPS,
)
from tests.unit.checkpoint.models import IDS, SHARDS, Model, X, assert_close, autodist, distributed

CHAIN = [
    (PartitionedPS(max_shards=3, **SHARDS), 2),
    (AllReduce(), 3),
    (ShardedAllReduce(**SHARDS), 2),
    (FSDP(**SHARDS), 3),
    (PS(), 1),
    (PartitionedAR(max_shards=2, **SHARDS), 3),
    (Parallax(max_shards=2, **SHARDS), 2),
    (UnevenPartitionedPS(max_shards=4, **SHARDS), 2),
    (PSLoadBalancing(max_shards=2, **SHARDS), 3),
    (RandomAxisPartitionAR(max_shards=3, seed=1, **SHARDS), 2),
    (PartitionedPS(max_shards=2, **SHARDS), 3),
]
"""Each run resumes from the one before: with other shards, on another number of replicas."""


@pytest.mark.slow
def test_each_strategy_goes_on_with_what_another_has_trained(tmp_path):
    expected = Model()
    for position, (builder, replicas) in enumerate(CHAIN):
        ad = autodist(builder, replicas)
        model, step = distributed(ad)
        checkpoint = ad.checkpoint(tmp_path, model=model, keep=2)
        assert checkpoint.restore() == (position or None)
        assert_close(model.values(), expected.values())
        step(X, IDS)
        expected.step(tf.constant(X), tf.constant(IDS))
        path = checkpoint.save(step=position + 1)
        now = model.values()
        assert_close(now, expected.values())
        plain = Model()
        tf.train.Checkpoint(model=plain).read(path).assert_existing_objects_matched()
        for name, value in plain.values().items():
            np.testing.assert_array_equal(value, now[name], err_msg=name)
    there = {name.partition(".")[0] for name in os.listdir(tmp_path)}
    assert there == {"checkpoint", f"ckpt-{len(CHAIN) - 1}", f"ckpt-{len(CHAIN)}"}


def test_a_variable_in_shards_is_written_in_slices_and_read_by_saver_and_loader(tmp_path):
    ad = autodist(PartitionedPS(max_shards=3, **SHARDS))
    model, step = distributed(ad)
    step(X, IDS)
    path = ad.checkpoint(tmp_path, model=model).save()
    now = model.values()
    loaded = tf.train.load_checkpoint(path).get_tensor("model/table/.ATTRIBUTES/VARIABLE_VALUE")
    np.testing.assert_array_equal(loaded, now["table:0"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = tf.compat.v1.get_variable("table", [7, 5], tf.float64)
        tf.compat.v1.train.Saver([table]).restore(session, path)
        np.testing.assert_array_equal(session.run(table), now["table:0"])


def test_between_two_steps_values_are_put_back_for_the_next(tmp_path):
    ad = autodist(PartitionedPS(max_shards=3, **SHARDS))
    model, step = distributed(ad)
    checkpoint = ad.checkpoint(tmp_path, model=model)
    losses = [float(step(X, IDS))]
    checkpoint.save(step=1)
    losses += [float(step(X, IDS)), float(step(X, IDS))]
    assert checkpoint.restore() == 1
    assert [float(step(X, IDS)), float(step(X, IDS))] == losses[1:]


def test_between_two_steps_no_value_in_shards_is_put_together(tmp_path):
    ad = autodist(PartitionedPS(max_shards=3, **SHARDS))
    with ad.scope():
        weight = tf.Variable(np.ones((400, 400)))

        @ad.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    x = np.random.default_rng(0).normal(size=(8, 400)) / 30
    checkpoint = ad.checkpoint(tmp_path, weight=weight)
    step(x)
    checkpoint.save()
    expected = [float(step(x)), float(step(x))]
    assert checkpoint.restore() == 0
    tracked = ad._run.tracker.of(weight)
    assert tracked.is_behind and not tracked.is_ahead and tracked.read().shape == [0]
    assert [float(step(x)), float(step(x))] == expected


def test_checkpoints_of_tensorflow_are_restored(tmp_path):
    saved = Model()
    saved.step(tf.constant(X), tf.constant(IDS))
    expected = saved.values()
    by_objects = tf.train.Checkpoint(model=saved).save(str(tmp_path / "objects"))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        named = [tf.compat.v1.get_variable(name[:-2], initializer=value) for name, value in expected.items()]
        session.run(tf.compat.v1.global_variables_initializer())
        by_names = tf.compat.v1.train.Saver(named).save(session, str(tmp_path / "names"))
    ad = autodist()
    for path in (by_objects, by_names):
        model, _ = distributed(ad)
        assert ad.checkpoint(tmp_path, model=model).restore(path) == 0
        for name, value in expected.items():
            np.testing.assert_array_equal(model.values()[name], value, err_msg=name)


def test_keras_goes_on_with_the_slots_of_an_optimizer_that_has_made_no_step(tmp_path):
    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    x = X.astype(np.float32)
    for part, builder in ((slice(0, 6), PartitionedPS(max_shards=3, **SHARDS)), (slice(6, 12), AllReduce())):
        ad = autodist(builder)
        with ad.scope():
            model = build()
        checkpoint = ad.checkpoint(tmp_path, model=model, optimizer=model.optimizer)
        checkpoint.restore()
        model.fit(x[part], x[part, :1], batch_size=3, shuffle=False, verbose=0)
        checkpoint.save()
    plain = build()
    plain.fit(x, x[:, :1], batch_size=3, shuffle=False, verbose=0)
    for one, other in zip(
        [*model.weights, *model.optimizer.variables], [*plain.weights, *plain.optimizer.variables], strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert int(model.optimizer.iterations) == 4


def test_a_checkpoint_of_another_model_is_refused_with_all_that_differs(tmp_path):
    ad = autodist()
    model, _ = distributed(ad)
    path = ad.checkpoint(tmp_path, model=model, more=tf.Variable(1.0)).save()
    other, _ = distributed(ad, width=3)
    before = other.values()
    with pytest.raises(CheckpointMismatchError) as raised:
        ad.checkpoint(tmp_path, model=other, new=tf.Variable(1.0)).restore()
    error = raised.value
    assert error.path == path
    assert error.missing == ("new/.ATTRIBUTES/VARIABLE_VALUE",)
    assert error.left_over == ("more/.ATTRIBUTES/VARIABLE_VALUE",)
    assert [other.partition("/.")[0] for other in error.others] == ["model/matrix", "model/momenta/1"]
    assert "(saved (5, 4) float64, now (5, 3) float64)" in str(error)
    for name, value in other.values().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("by_tensorflow", [False, True])
def test_another_dtype_is_refused_and_listed(tmp_path, by_tensorflow):
    ad, saved, now = autodist(), tf.Variable([1.0, 2.0]), tf.Variable([3, 4])
    if by_tensorflow:
        path = tf.train.Checkpoint(v=saved).save(str(tmp_path / "saved"))
    else:
        path = ad.checkpoint(tmp_path, v=saved).save()
    with pytest.raises(CheckpointMismatchError) as raised:
        ad.checkpoint(tmp_path, v=now).restore(path)
    assert raised.value.others == ("v/.ATTRIBUTES/VARIABLE_VALUE (saved (2,) float32, now (2,) int32)",)
    assert now.numpy().tolist() == [3, 4]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("by_tensorflow", [False, True])
@pytest.mark.parametrize("suffix", [".data-00000-of-00001", ".index"])
@pytest.mark.parametrize("harm", ["shorter", "altered", "gone"])
def test_a_damaged_file_is_refused_before_anything_is_changed(tmp_path, by_tensorflow, suffix, harm):
    ad = autodist()
    saved, model = Model(), Model()
    saved.step(tf.constant(X), tf.constant(IDS))
    if by_tensorflow:
        path = tf.train.Checkpoint(model=saved).save(str(tmp_path / "model"))
    else:
        path = ad.checkpoint(tmp_path, model=saved).save()
    file = Path(path + suffix)
    if harm == "shorter":
        os.truncate(file, file.stat().st_size - 9)
    elif harm == "altered":
        flip(file)
    else:
        file.unlink()
    before = model.values()
    with pytest.raises(CheckpointError, match="is damaged|there is no checkpoint"):
        ad.checkpoint(tmp_path, model=model).restore(path)
    for name, value in model.values().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_side_file_that_is_damaged_or_of_a_later_version_is_refused(tmp_path):
    ad = autodist()
    checkpoint = ad.checkpoint(tmp_path, model=Model())
    side = Path(f"{checkpoint.save()}.json")
    side.write_text(json.dumps({**json.loads(side.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="a later version has written it"):
        checkpoint.restore()
    side.write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.restore()


def test_a_checkpoint_without_the_side_file_that_it_had_is_refused(tmp_path):
    """It would be taken for one of TensorFlow's, and the run would go on from step 0."""
    checkpoint = autodist().checkpoint(tmp_path, model=Model())
    side = Path(f"{checkpoint.save(step=12)}.json")
    content = side.read_text()
    side.unlink()
    with pytest.raises(CheckpointError, match=r"ckpt-1\.json is missing"):
        checkpoint.restore()
    side.write_text(content)
    assert checkpoint.restore() == 12


def test_a_side_file_in_which_one_number_is_another_is_refused(tmp_path):
    """It would be read without a complaint, and the run would go on from another step."""
    model = Model()
    checkpoint = autodist().checkpoint(tmp_path, model=model)
    side = Path(f"{checkpoint.save(step=12)}.json")
    side.write_text(side.read_text().replace('"step": 12', '"step": 13'))
    model.step(tf.constant(X), tf.constant(IDS))
    before = model.values()
    with pytest.raises(CheckpointError, match=r"ckpt-1\.json: it is not what was written"):
        checkpoint.restore()
    for name, value in model.values().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_save_that_fails_leaves_the_earlier_ones(tmp_path, monkeypatch):
    ad = autodist()
    model = Model()
    checkpoint = ad.checkpoint(tmp_path, model=model)
    path = checkpoint.save(step=5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("autodist.checkpoint.folder.os.fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device.*Free some space"):
            checkpoint.save(step=6)
    assert checkpoint.latest == path and checkpoint.restore() == 5
    assert checkpoint.save(step=7) != path and checkpoint.restore() == 7


def test_a_run_that_does_not_go_on_writes_beside_what_is_there(tmp_path):
    ad = autodist()
    first = ad.checkpoint(tmp_path, model=Model()).save(step=1)
    second = ad.checkpoint(tmp_path, model=Model()).save(step=2)
    assert [os.path.basename(path) for path in (first, second)] == ["ckpt-1", "ckpt-2"]
    assert os.path.exists(f"{first}.index")


def test_a_folder_that_another_run_writes_is_refused_and_left_as_it_is(tmp_path):
    ad = autodist()
    path = ad.checkpoint(tmp_path, model=Model()).save(step=1)
    FolderLock.release_all()
    before = sorted(os.listdir(tmp_path))
    with open(tmp_path / "checkpoint.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is in use by another process"):
            ad.checkpoint(tmp_path, model=Model()).save(step=2)
        assert sorted(os.listdir(tmp_path)) == [*before[:1], "checkpoint.lock", *before[1:]]
        assert ad.checkpoint(tmp_path, model=Model()).restore(path) == 1  # reading is everybody's


def test_an_empty_folder_restores_nothing(tmp_path):
    assert autodist().checkpoint(tmp_path / "none", model=Model()).restore() is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("asked", [{"keep": 0, "model": Model()}, {}])
def test_meaningless_arguments_are_refused(tmp_path, asked):
    with pytest.raises(ValueError):
        autodist().checkpoint(tmp_path, **asked)


def test_in_a_graph_a_saver_is_named(tmp_path):
    ad = autodist()
    with tf.Graph().as_default(), pytest.raises(CheckpointError, match="Saver"):
        ad.checkpoint(tmp_path, model=Model)
