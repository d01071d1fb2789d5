"""The position of a script's own loop: its data sets and its NumPy and Python generators resume there, bit for bit."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist
from tests.unit.checkpoint.test_automatic import autodist

ROWS = np.random.default_rng(0).normal(size=(20, 3))


def make(ad: AutoDist) -> tuple[tf.Variable, Any]:
    with ad.scope():
        weight = tf.Variable(np.ones(3))

        @ad.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * weight, 1) - 1.0))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    return weight, step


class Shuffled:
    """Batches in an order that each iteration draws from NumPy's generator."""

    def __iter__(self) -> Iterator[np.ndarray]:
        order = np.random.permutation(len(ROWS))
        for at in range(0, len(ROWS), 4):
            yield ROWS[order[at : at + 4]]


def by_tensorflow() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(ROWS).shuffle(20).batch(4)


def drawing_ahead() -> tf.data.Dataset:
    """A data set whose Python code draws in a TensorFlow thread, ahead of the batches in use."""

    def augmented() -> Iterator[np.ndarray]:
        for at in range(0, len(ROWS), 4):
            yield ROWS[at : at + 4] + 0.1 * np.random.normal(size=(4, 3))

    return tf.data.Dataset.from_generator(augmented, output_signature=tf.TensorSpec([4, 3], tf.float64)).prefetch(2)


def by_itself() -> Iterator[np.ndarray]:
    """A generator that is not restarted."""
    return (ROWS[at % 20 : at % 20 + 4] for at in range(0, 400, 4))


def train(ad: AutoDist, data: Any, steps: int, noise: bool) -> np.ndarray:
    """Of epochs of at most four steps."""
    weight, step = make(ad)
    batches, done = ad.distribute_dataset(data), ad.steps_done
    while done < steps:
        for batch in batches:
            x = batch + (random.gauss(0, 0.1) + 0.1 * np.random.normal(size=3) if noise else 0.0)
            step(x)
            done += 1
            if noise:
                np.random.uniform()  # after the step, and still of it
            if done % 4 == 0 or done == steps:
                break
    return weight.numpy()


@pytest.mark.parametrize(
    ("data", "noise", "saved"),
    [(Shuffled, True, 3), (by_tensorflow, True, 4), (drawing_ahead, False, 6), (by_itself, True, 6)],
)
def test_a_loop_over_a_data_set_goes_on_to_the_bit(tmp_path, caplog, data, noise, saved):
    """In the middle of an epoch, at its end, and in the second one, which may have another order."""

    def begin(folder: str) -> AutoDist:
        random.seed(1), np.random.seed(2), tf.random.set_seed(3)
        return autodist(tmp_path / folder, every_steps=saved)

    expected = train(begin("whole"), data(), 9, noise)
    ad = begin("parts")
    train(ad, data(), saved + 1, noise)
    ad._automatic._saves.wait()
    ad = begin("parts")
    assert ad.steps_done == saved
    with caplog.at_level(logging.WARNING, "autodist"):
        np.testing.assert_array_equal(train(ad, data(), 9, noise), expected)
    assert "data set" not in caplog.text and "generator" not in caplog.text


def test_a_loop_that_draws_its_batches_itself_goes_on_to_the_bit(tmp_path, caplog):
    """Draws for the last step before the save are repeated; initial draws of the restarted script are not."""

    def train(folder: str, steps: int) -> np.ndarray:
        np.random.seed(2)
        ad = autodist(tmp_path / folder, every_steps=2)
        np.random.seed(ad.steps_done + 5)  # the script's own affair: it is not the head of the loop
        weight, step = make(ad)
        for _ in range(ad.steps_done, steps):
            step(np.random.normal(size=(4, 3)))
        ad._automatic._saves.wait()
        return weight.numpy()

    expected = train("whole", 7)
    train("parts", 5)
    with caplog.at_level(logging.WARNING, "autodist"):
        np.testing.assert_array_equal(train("parts", 7), expected)
    assert "generator" not in caplog.text


def test_a_loop_whose_head_is_not_seen_is_told(tmp_path, caplog):
    def train(steps: int) -> None:
        ad = autodist(tmp_path, every_steps=2)
        begin = ad.steps_done
        _, step = make(ad)
        for _ in range(begin, steps):
            step(np.random.normal(size=(4, 3)))
        ad._automatic._saves.wait()

    with caplog.at_level(logging.WARNING, "autodist"):
        train(5)
        assert "generator was used between steps" not in caplog.text
        train(6)
    assert "NumPy's or Python's generator was used between steps" in caplog.text


def test_a_data_set_that_passes_over_by_itself_is_told_and_left_alone(tmp_path, caplog):
    def train(steps: int) -> np.ndarray:
        ad = autodist(tmp_path, every_steps=2)
        weight, step = make(ad)
        for batch in ad.distribute_dataset(by_tensorflow_in_order().skip(ad.steps_done).take(steps - ad.steps_done)):
            step(batch)
        ad._automatic._saves.wait()
        return weight.numpy()

    def by_tensorflow_in_order() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(ROWS).batch(4)

    train(3)
    ad = AutoDist()
    weight, step = make(ad)
    for batch in by_tensorflow_in_order():
        step(batch)
    with caplog.at_level(logging.WARNING, "autodist"):
        np.testing.assert_allclose(train(5), weight.numpy(), rtol=1e-13)
    assert "its first batch differs from that of the resumed run, which had taken 2 batches" in caplog.text


def test_a_data_set_that_is_made_between_two_steps_is_told(tmp_path, caplog):
    ad = autodist(tmp_path, every_steps=3)
    _, step = make(ad)
    for _ in range(2):
        for batch in ad.distribute_dataset([ROWS[:4], ROWS[4:8]]):
            step(batch)
    ad._automatic._saves.wait()
    assert (
        "created by ad.distribute_dataset or ad.sampler after the first training step have no position in checkpoints"
        in caplog.text
    )


def test_a_checkpoint_of_the_script_s_own_has_what_it_draws(tmp_path):
    ad = AutoDist()
    checkpoint = ad.checkpoint(tmp_path, model=tf.Module())
    checkpoint.save(step=1)
    expected = np.random.normal(size=3), random.gauss(0, 1)
    random.seed(1), np.random.seed(2)
    checkpoint.restore()
    found = np.random.normal(size=3), random.gauss(0, 1)
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_train_on_batch_in_a_loop_goes_on_to_the_bit(tmp_path):
    """Values, slots, dropout and the running metrics that it returns."""

    def train(folder: str, steps: int) -> tuple[list[Any], list[np.ndarray]]:
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        ad = autodist(tmp_path / folder, every_steps=2)
        with ad.scope():
            layers = [keras.layers.Dropout(0.3), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((3,)), *layers])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        told = []
        for _ in range(ad.steps_done, steps):
            x = np.random.normal(size=(8, 3))
            told.append(model.train_on_batch(x, x[:, :1]))
        ad._automatic._saves.wait()
        return told, [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]

    expected, values = train("whole", 7)
    train("parts", 5)
    found, again = train("parts", 7)
    assert found == expected[4:]
    for one, other in zip(again, values, strict=True):
        np.testing.assert_array_equal(one, other)


def by_numbers(ad: AutoDist, steps: int, reads_ahead: bool = False, skips: bool = False) -> np.ndarray:
    """Of epochs of five batches; the last has half as many records."""
    weight, step = make(ad)
    sampler, done = ad.sampler(18, 4, seed=1), ad.steps_done
    if skips:
        sampler.skip(done)
    while done < steps:
        numbers = iter(sampler)
        if reads_ahead:
            spec = tf.TensorSpec([None], tf.int64)
            numbers = iter(tf.data.Dataset.from_generator(lambda: sampler, output_signature=spec).prefetch(2))
        for some in itertools.islice(numbers, steps - done):
            step(ROWS[some])
            done += 1
    ad._automatic._saves.wait()
    return weight.numpy()


@pytest.fixture(scope="module")
def nine_steps(tmp_path_factory) -> np.ndarray:
    return by_numbers(autodist(tmp_path_factory.mktemp("whole")), 9)


@pytest.mark.parametrize(("saved", "skips"), [(3, True), (5, False), (5, True), (7, False)])
def test_a_loop_over_a_sampler_goes_on_in_the_middle_and_at_the_end_of_an_epoch(tmp_path, nine_steps, saved, skips):
    by_numbers(autodist(tmp_path, every_steps=saved), saved + 1)
    ad = autodist(tmp_path, every_steps=100)
    assert ad.steps_done == saved
    np.testing.assert_array_equal(by_numbers(ad, 9, skips=skips), nine_steps)


def test_a_sampler_that_another_thread_reads_has_no_place_and_that_is_told(tmp_path, caplog, nine_steps):
    with caplog.at_level(logging.WARNING, "autodist"):
        by_numbers(autodist(tmp_path), 5, reads_ahead=True)
    assert caplog.text.count("a sampler is read in another thread") == 1
    caplog.clear()
    found = by_numbers(autodist(tmp_path), 9, reads_ahead=True, skips=True)
    np.testing.assert_array_equal(found, nine_steps)
    assert "another thread" not in caplog.text
