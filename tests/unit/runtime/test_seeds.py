"""The generators that AutoDist seeds, and those that it leaves to the script."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from autodist.runtime import seeds
from autodist.runtime.seeds import set_default_seed

v1 = tf.compat.v1
RUN_SEED = 1234567


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process in which no seed was set."""
    monkeypatch.setattr(random_seed, "get_seed", random_seed.get_seed)
    monkeypatch.setattr(seeds, "_set_here", set())
    before = context.context()._seed
    context.context()._seed = None
    yield
    context.context()._seed = before


def shuffled(**seed):
    return [int(k) for k in tf.data.Dataset.range(20).shuffle(20, **seed)]


def drawn_in_a_function(**seed):
    return float(tf.function(lambda: tf.random.uniform([], **seed))())


def drawn_in_a_graph(set_seed, **seed):
    with tf.Graph().as_default():
        set_seed()
        element = v1.data.make_one_shot_iterator(tf.data.Dataset.range(20).shuffle(20, **seed).batch(20)).get_next()
        fetches = [element, tf.random.normal([2], **seed)]
        with v1.Session() as session:
            return [value.tolist() for value in session.run(fetches)]


@pytest.mark.parametrize("draw", [shuffled, drawn_in_a_function])
def test_seeded_draws_equal_those_without_autodist(draw):
    alone = draw(seed=7), draw(seed=0), draw(seed=2**40 + 1)
    set_default_seed(RUN_SEED)
    assert (draw(seed=7), draw(seed=0), draw(seed=2**40 + 1)) == alone


@pytest.mark.parametrize("draw", [shuffled, drawn_in_a_function])
def test_unseeded_draws_are_equal_in_all_processes_of_a_run_and_differ_between_runs(draw):
    drawn = []
    for seed in (RUN_SEED, RUN_SEED, RUN_SEED + 1):
        context.context()._seed = None  # as in a new process
        set_default_seed(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_graph_is_seeded_like_eager_code():
    def ours(seed=RUN_SEED):
        return lambda: set_default_seed(seed)

    assert drawn_in_a_graph(ours(), seed=7) == drawn_in_a_graph(lambda: None, seed=7)
    assert drawn_in_a_graph(ours()) == drawn_in_a_graph(ours()) != drawn_in_a_graph(ours(RUN_SEED + 1))


def test_a_seed_that_the_script_has_set_for_all_is_kept_and_mixed_as_tensorflow_does():
    def of_the_script():
        v1.set_random_seed(5)

    def both():
        of_the_script()
        set_default_seed(RUN_SEED)

    assert drawn_in_a_graph(both, seed=7) == drawn_in_a_graph(of_the_script, seed=7)
    tf.random.set_seed(5)
    alone = shuffled(seed=7), shuffled()
    tf.random.set_seed(5)
    set_default_seed(RUN_SEED)
    assert (shuffled(seed=7), shuffled()) == alone


def test_a_seed_that_the_script_sets_later_is_mixed_as_tensorflow_does():
    tf.random.set_seed(5)
    alone = shuffled(seed=7)
    context.context()._seed = None
    set_default_seed(RUN_SEED)
    assert shuffled(seed=7) != alone
    tf.random.set_seed(5)
    assert shuffled(seed=7) == alone


@pytest.mark.parametrize("by_script", [False, True])
def test_seeds_go_on_where_another_process_was(by_script):
    def begin(seed):
        if by_script:
            tf.random.set_seed(7)
        else:
            set_default_seed(seed)

    begin(1)
    shuffled()
    then = json.loads(json.dumps(seeds.seeds_now()))
    expected = [shuffled(), shuffled()]
    context.context()._seed = None
    begin(2)
    assert not seeds.resume_seeds(then)
    assert [shuffled(), shuffled()] == expected
    assert context.global_seed() == (7 if by_script else 1)


def test_a_script_s_other_seed_stays_and_is_told():
    tf.random.set_seed(7)
    then = seeds.seeds_now()
    tf.random.set_seed(8)
    expected = shuffled()
    tf.random.set_seed(8)
    assert "the seed 8, and 7 in the run that has saved" in seeds.resume_seeds(then)
    assert shuffled() == expected


def test_an_unset_seed_has_no_state_to_resume():
    assert seeds.seeds_now() == {}
    assert seeds.resume_seeds({}) == ""
