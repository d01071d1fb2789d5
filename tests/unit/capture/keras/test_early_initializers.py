"""Early initializers: unseeded ones draw the same values in runs with one seed; all others draw as on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras.src.initializers.random_initializers import RandomInitializer

from autodist.capture.keras.early_initializers import seed_early_initializers
from autodist.runtime.seeds import is_seeded_by_script


@pytest.fixture
def early(monkeypatch):
    """Initializers that were made before a run, and the run's seed is 5."""
    made = [keras.initializers.GlorotUniform(), keras.initializers.RandomNormal(seed=3), keras.initializers.HeNormal()]
    for one in made:
        vars(one).pop("_autodist_is_later", None)  # of a run that another test has made in this process
    monkeypatch.setattr(RandomInitializer, "seed", None, raising=False)  # removed again by monkeypatch
    seed_early_initializers(5)
    return made


def drawn(initializer):
    return np.asarray(initializer((2, 3)))


def test_early_ones_take_the_seeds_of_the_run_in_the_order_of_their_use(early):
    found = [drawn(early[2]), drawn(early[0])]
    others = [keras.initializers.HeNormal(), keras.initializers.GlorotUniform()]
    for one in others:
        vars(one).pop("_autodist_is_later")  # as if made before, in another process
    seed_early_initializers(5)
    for mine, theirs in zip(found, map(drawn, others), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_they_draw_the_same_each_time_and_their_configuration_has_no_seed(early):
    np.testing.assert_array_equal(drawn(early[0]), drawn(early[0]))
    assert early[0].get_config()["seed"] is None


def test_a_seed_of_the_script_is_kept(early):
    expected = drawn(keras.initializers.RandomNormal(seed=3))
    np.testing.assert_array_equal(drawn(early[1]), expected)


def test_later_ones_draw_their_seed_from_pythons_generator(early):
    keras.utils.set_random_seed(2)
    expected = keras.src.random.seed_generator.python_random.Random(2).randint(1, int(1e9))
    assert keras.initializers.GlorotUniform().seed == expected


def test_a_script_that_seeds_numpy_or_all_is_known_to_have_set_seeds():
    np.random.seed(1)
    assert is_seeded_by_script()
