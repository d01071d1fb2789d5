"""`checkpoint` in the YAML: a script's own loop resumes from the last checkpoint; only its range changes."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.checkpoint.lock import FolderLock
from autodist.errors import CheckpointError, CheckpointMismatchError
from autodist.strategies import AllReduce, PartitionedPS
from tests.unit.checkpoint.models import IDS, SHARDS, Model, X, assert_close, distributed


def autodist(folder, builder=None, every_steps: int = 2, replicas: int = 2, **said) -> AutoDist:
    FolderLock.release_all()  # as at the end of the run before
    spec = ResourceSpec.from_dict(
        {
            "nodes": [{"address": "localhost", "cpus": list(range(replicas))}],
            "checkpoint": {"folder": str(folder), "every_steps": every_steps, **said},
        }
    )
    return AutoDist(resource_spec=spec, strategy=builder or AllReduce())


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(step)
    return draw.normal(size=X.shape), draw.integers(0, 7, size=IDS.shape)


def run(ad: AutoDist, steps: int, ends: bool = True) -> dict[str, np.ndarray]:
    model, step = distributed(ad)
    for number in range(ad.steps_done, steps):
        step(*batch(number))
    values = model.values()
    if ends:
        ad._run.end.finish()
    else:
        ad._automatic._saves.wait()  # as if it was killed later
    return values


def test_a_run_goes_on_where_the_last_one_was_saved(tmp_path, caplog):
    """The first is killed after its fifth step, and saved after the fourth; the second has another strategy."""
    run(autodist(tmp_path, PartitionedPS(max_shards=3, **SHARDS)), 5, ends=False)
    with caplog.at_level(logging.INFO, "autodist"):
        ad = autodist(tmp_path, replicas=3)
    assert f"resuming from step 4, saved as {tmp_path}/ckpt-2" in caplog.text
    assert ad.steps_done == 4
    found = run(ad, 9)
    expected = Model()
    for number in range(9):
        expected.step(*map(tf.constant, batch(number)))
    assert_close(found, expected.values())
    assert autodist(tmp_path).steps_done == 9  # a run that ends is saved
    assert "has not asked" not in caplog.text


def test_under_the_same_strategy_it_is_the_uninterrupted_run_to_the_bit(tmp_path):
    whole = run(autodist(tmp_path / "whole"), 6)
    run(autodist(tmp_path / "parts"), 3, ends=False)
    parts = run(autodist(tmp_path / "parts"), 6)
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


def test_the_seed_is_that_of_the_run_before(tmp_path):
    ad = autodist(tmp_path)
    run(ad, 2)
    assert autodist(tmp_path)._run.seed == ad._run.seed


def test_a_saver_reads_what_was_saved_by_the_variables_names(tmp_path):
    values = run(autodist(tmp_path, PartitionedPS(max_shards=3, **SHARDS)), 2)
    path = tf.train.latest_checkpoint(str(tmp_path))
    reader = tf.train.load_checkpoint(path)
    for name, value in values.items():
        np.testing.assert_array_equal(reader.get_tensor(name.removesuffix(":0")), value)


def test_only_the_last_ones_stay(tmp_path):
    run(autodist(tmp_path, every_steps=1, keep=2), 5)
    assert sorted(name for name in os.listdir(tmp_path) if name.endswith(".index")) == ["ckpt-4.index", "ckpt-5.index"]


def test_a_loop_that_counts_by_itself_is_told(tmp_path, caplog):
    run(autodist(tmp_path), 2)
    _, step = distributed(autodist(tmp_path))
    step(*batch(0))
    assert "those after 2 steps, but the script has not read ad.steps_done" in caplog.text


class Two:
    """Two networks of a loop, with variables of equal names, and an object that no training step uses."""

    def __init__(self, ad: AutoDist) -> None:
        with ad.scope():
            self.one, self.other = tf.Variable(np.ones(3), name="w"), tf.Variable(np.ones(2), name="w")
            self.unknown = tf.Variable(0.0, name="unknown")
            self.train_one, self.train_other = (
                ad.function(self.step_of(self.one)),
                ad.function(self.step_of(self.other)),
            )

    @staticmethod
    def step_of(variable):
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x) * tf.reduce_sum(variable**2)
            variable.assign_sub(0.1 * tape.gradient(loss, variable))
            return loss

        return step

    def train(self, ad: AutoDist, rounds: int) -> list[np.ndarray]:
        for number in range(ad.steps_done // 2, rounds):
            self.train_one(np.full(4, number + 1.0))
            self.unknown.assign_add(1.0)
            self.train_other(np.full(4, number + 2.0))
        return [v.numpy() for v in (self.one, self.other, self.unknown)]


def test_a_loop_of_several_steps_is_saved_where_it_begins_again(tmp_path):
    expected = Two(whole := autodist(tmp_path / "whole")).train(whole, 5)
    ad = autodist(tmp_path / "parts", every_steps=3)
    Two(ad).train(ad, 3)
    ad._automatic._saves.wait()
    assert [name for name in os.listdir(tmp_path / "parts") if name.endswith("index")] == ["ckpt-1.index"]
    assert ad.steps_done == 6
    again = autodist(tmp_path / "parts")
    assert again.steps_done == 4  # three steps were due in the middle of a round
    found = Two(again).train(again, 5)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert found[2] == 3.0 and expected[2] == 5.0


def test_values_written_between_steps_are_saved(tmp_path):
    ad = autodist(tmp_path, every_steps=1)
    model, step = distributed(ad)
    step(*batch(0))
    model.matrix.assign(tf.zeros_like(model.matrix))
    step(*batch(1))
    ad._automatic._saves.wait()
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
    np.testing.assert_array_equal(reader.get_tensor("matrix"), 0.0)


def test_another_model_is_refused_before_it_is_trained(tmp_path):
    run(autodist(tmp_path), 2)
    model, step = distributed(autodist(tmp_path), width=3)
    before = model.values()
    with pytest.raises(CheckpointMismatchError) as raised:
        step(*batch(2))
    assert "matrix (saved (5, 4) float64, now (5, 3) float64)" in raised.value.others
    for name, value in model.values().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_step_without_a_saved_variable_is_reported_unless_all_saved_ones_are_restored(tmp_path, caplog):
    """If the names of all variables have changed, the run would go on from initial values without a word."""

    def train(names):
        ad = autodist(tmp_path)
        with ad.scope():
            variables = [tf.Variable([1.0, 2.0], name=name) for name in names]
            steps = [ad.function(Two.step_of(variable)) for variable in variables]
        for number in range(ad.steps_done, ad.steps_done + 2):
            for step in steps:
                step(np.full(4, number + 1.0, np.float32))
        ad._run.end.finish()

    train(["before"])
    train(["before", "added"])
    assert "initial values" not in caplog.text
    train(["now", "before", "added"])
    assert caplog.text.count("initial values") == 1
    assert "has no value of a step with the variables now, which begins" in caplog.text
    assert "it has values of added, before, which no step has used yet" in caplog.text


def test_a_checkpoint_of_the_scripts_own_is_refused(tmp_path):
    ad = AutoDist()
    ad.checkpoint(tmp_path, model=Model()).save(step=3)
    with pytest.raises(CheckpointError, match="was saved by a script's own call"):
        autodist(tmp_path)


def test_an_evaluation_is_no_step_and_is_not_restored(tmp_path):
    def build(ad):
        with ad.scope():
            model = Model()
            total = tf.Variable(0.0, dtype=tf.float64, name="total", trainable=False)
            return model, total, ad.function(model.step), ad.function(lambda x: total.assign_add(tf.reduce_sum(x)))

    ad = autodist(tmp_path)
    _, _, step, evaluate = build(ad)
    evaluate(X)
    step(*batch(0))
    assert ad.steps_done == 1
    ad._run.end.finish()
    _, total, step, evaluate = build(autodist(tmp_path))
    step(*batch(1))
    evaluate(X)
    np.testing.assert_allclose(total.numpy(), X.sum())
