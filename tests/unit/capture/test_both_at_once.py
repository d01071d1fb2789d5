"""State that a conditional computes from a batch, and that the loss then reads, is computed from the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.errors import RewriteError
from tests.unit.kernels.in_one_process import Trained, assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

BATCHES = [(np.random.default_rng(k).normal(2, 3, (rows, 4)),) for k, rows in enumerate((9, 8, 5, 7))]


class State:
    def __init__(self) -> None:
        self.weight = tf.Variable(np.ones(4), name="weight")
        self.scale = tf.Variable(1.0, dtype=tf.float64, name="scale")
        self.shift = tf.Variable(0.5, dtype=tf.float64, name="shift")
        self.ready = tf.Variable(False, name="ready", trainable=False)
        self.steps = tf.Variable(0, name="steps", trainable=False)


def set_by_cond(state: State, raw: tf.Tensor) -> tf.Tensor:
    """As weight normalisation sets its scale."""

    def first() -> None:
        state.scale.assign(1 / tf.math.reduce_std(raw))
        state.shift.assign_sub(tf.reduce_mean(raw))
        state.ready.assign(True)

    tf.cond(tf.identity(state.ready), lambda: None, first)
    return raw * state.scale + state.shift


def set_by_autograph(state: State, raw: tf.Tensor) -> tf.Tensor:
    if state.steps % 3 == 0:
        if not state.ready:
            state.scale.assign(1 / tf.math.reduce_std(raw))
            state.ready.assign(True)
        else:
            state.scale.assign_add(tf.reduce_mean(raw) / 10)
    state.steps.assign_add(1)
    return raw * state.scale + state.shift


def given_back(state: State, raw: tf.Tensor) -> tf.Tensor:
    """As TensorFlow Addons' WeightNormalization reads its own within the condition."""

    def first() -> tf.Tensor:
        with tf.control_dependencies([state.scale.assign(1 / tf.math.reduce_std(raw)), state.ready.assign(True)]):
            return tf.identity(state.scale)

    scale = tf.cond(tf.identity(state.ready), lambda: tf.identity(state.scale), first)
    return raw * scale + state.shift * state.scale


Normalise = Callable[[State, tf.Tensor], tf.Tensor]
NORMALISATIONS: list[Normalise] = [set_by_cond, set_by_autograph, given_back]


def step_of(normalise: Normalise) -> Callable[[tf.Tensor], tf.Tensor]:
    state = State()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.elu(normalise(state, tf.linalg.matvec(x, state.weight))))
        trained = [state.weight, state.scale, state.shift]
        for v, g in zip(trained, tape.gradient(loss, trained), strict=True):
            v.assign_sub(0.1 * g)
        return loss

    return step


@lru_cache(maxsize=1)  # for all layouts
def on_one_device(normalise: Normalise) -> tuple[CapturedFunction, Trained]:
    step = step_of(normalise)
    captured = capture(step, *BATCHES[0], is_split=True)
    return captured, one_device(captured, tf.function(step, reduce_retracing=True), BATCHES)


LAYOUTS = [((2, 2), {}), ((1, 3), {}), ((2, 1), {}), ((2, 1), {"weight": 0, "scale": 1, "shift": 0})]


@pytest.mark.parametrize("normalise, layout", pairs(NORMALISATIONS, LAYOUTS))
def test_state_that_a_condition_sets_from_the_first_batch_trains_as_on_one_device(
    normalise: Normalise, layout: tuple[tuple[int, int], dict[str, int]]
) -> None:
    captured, expected = on_one_device(normalise)
    (workers, replicas), owners = layout
    found = train(captured, plan(captured.step, workers, replicas, owners=owners), BATCHES)
    assert_same(found, expected, 1e-11)


def printing(state: State, raw: tf.Tensor) -> tf.Tensor:
    def first() -> None:
        tf.print("sets the scale")
        state.scale.assign(1 / tf.math.reduce_std(raw))
        state.ready.assign(True)

    tf.cond(tf.identity(state.ready), lambda: None, first)
    return raw * state.scale + state.shift


@pytest.mark.parametrize(
    "is_split, told", [(False, "read again for what is differentiated.*tf.where"), (True, "Print")]
)
def test_a_step_is_refused_if_only_one_branch_is_traced(is_split: bool, told: str) -> None:
    step = step_of(printing if is_split else set_by_cond)
    captured = capture(step, *BATCHES[0], is_split=is_split)
    assert captured.step.graph_index.of_op("If")
    with pytest.raises(RewriteError, match=told):
        rewritten(captured, plan(captured.step, 1, 2))


def test_a_condition_that_sets_nothing_from_the_batch_stays_one() -> None:
    def counting(state: State, raw: tf.Tensor) -> tf.Tensor:
        tf.cond(state.steps < 2, lambda: state.scale.assign(1.5), lambda: tf.identity(state.scale))
        return raw * state.scale + state.shift

    captured = capture(step_of(counting), *BATCHES[0], is_split=True)
    assert captured.step.graph_index.of_op("If")
    assert not captured.step.in_step_all_reduces
