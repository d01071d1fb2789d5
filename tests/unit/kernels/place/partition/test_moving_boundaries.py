"""Training equals one device for any boundaries of the shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.in_one_process import capture, plan
from tests.unit.kernels.place.partition.shards import SHUFFLE, Owners, assert_trains_alike, cut_in_strategy, numbers

WORKERS = 3
FEW = settings(derandomize=True, max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class DrawnCut:
    """A variable's shape, its partition, and the owner of each shard."""

    shape: tuple[int, ...]
    cut: Partitioning
    owners: Owners


def owners_of(count: int) -> st.SearchStrategy[Owners]:
    return st.lists(st.sampled_from([SHUFFLE, *range(WORKERS)]), min_size=count, max_size=count)


@st.composite
def compositions(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """Lengths of shards, each from 1, that add up."""
    ends = sorted(draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    return tuple(end - start for start, end in itertools.pairwise([0, *ends, length]))


@st.composite
def drawn_cuts(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> DrawnCut:
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(compositions(shape[axis]))
    return DrawnCut(shape, Partitioning(axis, sizes), draw(owners_of(len(sizes))))


def by_hand(v: tf.Variable, slot: tf.Variable, gradient: tf.Tensor) -> None:
    """Momentum of a clipped gradient, decayed by the norm of the rows and the mean of all."""
    gradient = tf.convert_to_tensor(gradient)
    gradient = tf.clip_by_norm(gradient, 0.3)
    slot.assign(0.9 * slot + gradient)
    rows = tf.sqrt(1e-3 + tf.reduce_sum(tf.square(v), -1, keepdims=True))
    v.assign_sub(0.1 * slot / rows + 0.01 * tf.reduce_mean(v) * tf.nn.softmax(v, 0))


def plain(v: tf.Variable, slot: tf.Variable, gradient: tf.Tensor) -> None:
    v.assign_sub(0.1 * gradient if isinstance(gradient, tf.Tensor) else 0.1 * tf.convert_to_tensor(gradient))


def by_rows(v: tf.Variable, slot: tf.Variable, gradient: tf.Tensor | tf.IndexedSlices) -> None:
    """Rows are added one by one, as they come."""
    if isinstance(gradient, tf.IndexedSlices):
        slot.scatter_add(tf.IndexedSlices(tf.square(gradient.values), gradient.indices))
        v.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
    else:
        slot.assign_add(tf.square(gradient))
        v.assign_sub(0.1 * gradient)


UPDATES = {"by hand": by_hand, "plain": plain, "by rows": by_rows}


def step_of(shape: tuple[int, ...], update: Callable[..., None], uses: str) -> Callable[..., object]:
    """A step of ids (int32, n × 2) whose loss depends on a whole variable, on its rows, or on both."""
    v = tf.Variable(numbers(0, *shape), name="v")
    slot = tf.Variable(np.zeros(shape), trainable=False, name="slot")

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            weights = tf.cast(tf.reduce_sum(ids, 1), tf.float64)
            loss = tf.constant(0.0, tf.float64)
            if uses != "whole":
                rows = tf.gather(v, tf.math.floormod(ids, shape[0]))
                loss += tf.reduce_mean(tf.square(tf.reshape(rows, [tf.shape(ids)[0], -1]) - weights[:, None]))
            if uses != "rows":
                loss += tf.reduce_mean(weights * tf.reduce_sum(tf.sin(v)))
        update(v, slot, tape.gradient(loss, v))
        return loss

    return step


@FEW
@given(drawn_cuts(), st.sampled_from(sorted(UPDATES)), st.sampled_from(["whole", "rows", "both"]))
def test_a_variable_of_any_shape_may_be_cut_anywhere(drawn, update, uses):
    step = step_of(drawn.shape, UPDATES[update], uses)
    batches = [(np.random.default_rng(k).integers(0, 7, (n, 2)).astype(np.int32),) for k, n in enumerate([6, 3, 4])]
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, WORKERS, 1)
    cut_in_strategy(strategy, "v", drawn.cut, drawn.owners)
    assert_trains_alike(captured, step, strategy, batches)
