"""Blocks that the option `recompute` selects, for models built in various ways."""

from __future__ import annotations

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.blocks import find_blocks
from tests.unit.kernels.in_one_process import capture

WIDTH = 4


class Block(keras.layers.Layer):
    """A residual block of two dense layers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.up, self.down = keras.layers.Dense(2 * WIDTH, "gelu"), keras.layers.Dense(WIDTH)

    def call(self, x):
        return x + self.down(self.up(x))


class Stack(keras.Model):
    """Blocks, and a head."""

    def __init__(self, count, **options):
        super().__init__(**options)
        self.blocks = [Block() for _ in range(count)]
        self.head = keras.layers.Dense(1)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def functional(count):
    inputs = x = keras.Input((WIDTH,))
    for k in range(count):
        x = Block(name=f"stage_{k}_block")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def flat(count):
    """Returns a functional model of layers that no other layer contains."""
    inputs = x = keras.Input((WIDTH,))
    for _ in range(count):
        h = keras.layers.Dense(2 * WIDTH, "gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH)(h)])
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def step_of(model):
    keras.utils.set_random_seed(1)
    x = np.ones((2, WIDTH), "float32")
    model(x)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        weights = [v.value for v in model.trainable_variables]
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    return capture(step, x).step


@functools.cache
def stacked():
    """The step of three blocks, for all tests."""
    keras.backend.clear_session()
    return step_of(Stack(3, name="stack"))


def names(step, choice):
    return [block.name for block in find_blocks(step, choice)]


def test_true_selects_the_layers_of_one_class_that_repeat():
    assert names(stacked(), True) == ["stack/block", "stack/block_1", "stack/block_2"]
    keras.backend.clear_session()
    assert names(step_of(functional(3)), True) == ["stage_0_block", "stage_1_block", "stage_2_block"]


def test_true_selects_sequences_of_layers_that_repeat():
    keras.backend.clear_session()
    found = find_blocks(step_of(flat(3)), True)
    assert [len(block.scopes) for block in found] == [4, 4, 4]
    assert found[0].name == "layer_normalization to add"


def test_a_chain_of_single_layers_is_divided_into_blocks_of_several():
    keras.backend.clear_session()
    model = keras.Sequential([keras.layers.Dense(WIDTH, "tanh") for _ in range(6)])
    assert [len(block.scopes) for block in find_blocks(step_of(model), True)] == [3, 3]


def test_patterns_match_paths_of_layers_and_their_ends():
    step = stacked()
    assert names(step, ("block_[12]",)) == ["stack/block_1", "stack/block_2"]
    assert names(step, ("stack/block",)) == ["stack/block"]
    assert names(step, ("block", "block_2/.*", "stack/block_2")) == ["stack/block", "stack/block_2"]
    assert names(step, (".*",)) == ["stack"]


def test_patterns_match_the_scopes_of_a_graph():
    step = step_of_graph()
    assert names(step, ("part_1",)) == ["part_1"]
    assert names(step, ("part_.*",)) == names(step, True) == ["part_0", "part_1", "part_2"]


def step_of_graph():
    weights = [tf.Variable(np.eye(WIDTH, dtype="float32"), name=f"w_{k}") for k in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            for k, weight in enumerate(weights):
                with tf.name_scope(f"part_{k}"):
                    x = tf.tanh(tf.sigmoid(x @ weight))
            loss = tf.reduce_mean(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    return capture(step, np.ones((2, WIDTH), "float32")).step


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (("blok_.*",), "the pattern 'blok_.*' matches no layer of this step .* The nearest layers are .*stack/block_"),
        (("(",), r"the pattern '\(' is no regular expression"),
        (("stack/dense_.*",), "the layers that 'stack/dense_.*' match compute nothing that the backward pass reads"),
    ],
)
def test_a_pattern_without_effect_is_refused(choice, message):
    with pytest.raises(StrategyError, match=message):
        find_blocks(stacked(), choice)


def test_a_model_without_repeated_layers_is_refused():
    keras.backend.clear_session()
    model = keras.Sequential([keras.layers.Dense(WIDTH, "tanh", name="one"), keras.layers.Dense(1, name="two")])
    message = "no layers of this step repeat in a chain .* by patterns, such as recompute: .* the outer layers are "
    with pytest.raises(StrategyError, match=message) as error:
        find_blocks(step_of(model), True)
    assert re.search(r"one.*two", str(error.value))
