"""Stages: nodes that run on every replica and nodes that run once, determined by the variables written."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from autodist.capture.function import capture_function
from autodist.graph.find_stages import find_stages, written_handles
from autodist.graph.names import node_of
from autodist.kernels.context import Context
from autodist.kernels.normalise.split_bundles import SplitBundles
from tests.unit.kernels.in_one_process import plan

X = tf.TensorSpec([None, 4], tf.float64)


pytestmark = pytest.mark.usefixtures("keras_in_float64")


def variable(name, *shape, trainable=True):
    return tf.Variable(np.ones(shape), name=name, trainable=trainable)


class Found:
    """The stages of a step after IdentityN nodes have been split, as in production."""

    def __init__(self, step, *specs):
        captured = capture_function(step, specs or (X,), [0] * len(specs or (X,)))
        self.outputs = captured.step.outputs
        self.step = SplitBundles().apply(captured.step, Context(plan(captured.step), 0))
        self.stages = find_stages(self.step)

    def names(self, writes):
        found = set()
        for write in writes:
            found |= {self.step.by_handle[h].name for h in self.stages.effects[write].writes}
        return found

    @property
    def updated(self):
        """The variables written in the update."""
        return self.names(w for w in self.stages.writes if w in self.stages.update)

    @property
    def state(self):
        """The variables written by the compute part."""
        return self.names(self.stages.state_writes)

    @property
    def synchronised(self):
        return [g.variable for g in self.stages.gradients]

    def is_once(self, position):
        """Returns True if an output is computed once."""
        return node_of(self.step.outputs[position]) in self.stages.once

    def levels_of_writes(self):
        return {name: self.stages.level_of(w) for w in self.stages.writes for name in self.names([w])}


def dense_step(optimizer, *after):
    """Returns a step with one weight and a Keras optimizer; calls `after(weight)` at its end."""
    weight = keras.Variable(np.ones((4, 2)), name="w")
    optimizer.build([weight])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight.value))
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])
        return [loss, *(f(weight, x) for f in after)]

    return step


def test_sgd_updates_its_weight_and_computes_its_loss():
    found = Found(dense_step(keras.optimizers.SGD(0.1)))
    assert "w" in found.updated and found.synchronised == ["w"]
    assert not found.is_once(0)


def test_slots_are_updated_and_the_counter_of_steps_is_not():
    found = Found(dense_step(keras.optimizers.Adam(0.1, name="adam")))
    assert found.updated == {"w", "adam/w_momentum", "adam/w_velocity"}
    assert found.state == {"adam/iteration"}


def test_weight_decay_is_part_of_the_update():
    assert "w" in Found(dense_step(keras.optimizers.AdamW(0.1, weight_decay=0.1))).updated


def test_weight_decay_that_follows_the_update_is_no_state():
    weight = variable("w", 4, 2)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        weight.assign(weight * 0.9)
        return loss

    found = Found(step)
    assert (found.updated, found.state) == ({"w"}, set())


def test_averages_of_weights_are_taken_after_the_update():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    found = Found(dense_step(optimizer))
    assert {n for n in found.updated if "average" in n}
    assert not {n for n in found.state if "average" in n}


def test_a_mean_of_a_weight_after_its_update_is_made_once():
    found = Found(dense_step(keras.optimizers.SGD(0.1), lambda w, x: tf.reduce_mean(w.value)))
    assert found.is_once(1)


def test_predictions_made_after_the_update_are_every_replicas_own():
    found = Found(dense_step(keras.optimizers.SGD(0.1), lambda w, x: x @ w.value))
    assert not found.is_once(1)


def test_gradient_accumulation_is_an_update():
    found = Found(dense_step(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)))
    assert "w" in found.updated
    assert {n for n in found.updated if "accum" in n}
    assert found.synchronised == ["w"]


def test_loss_scaling_is_an_update():
    found = Found(dense_step(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))))
    assert "w" in found.updated
    assert {n for n in found.updated if "dynamic_scale" in n}


def gan():
    critic, maker = variable("critic", 4, 1), variable("maker", 4, 4)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ critic)) - tf.reduce_mean((x @ maker) @ critic)
        critic.assign_sub(0.1 * tape.gradient(loss, critic))
        with tf.GradientTape() as tape:
            second = tf.reduce_mean(tf.square((x @ maker) @ critic))
        maker.assign_sub(0.1 * tape.gradient(second, maker))
        return second

    return step


def test_two_optimizers_make_two_pairs_of_stages():
    found = Found(gan())
    assert (found.synchronised, found.stages.level) == (["critic", "maker"], (1, 2))
    assert found.levels_of_writes() == {"critic": 1, "maker": 2}


def test_the_first_update_of_two_is_not_part_of_compute():
    found = Found(gan())
    assert (found.updated, found.state) == ({"critic", "maker"}, set())


def test_a_read_of_the_first_update_on_the_way_to_the_second_gradient_is_compute():
    found = Found(gan())
    late = [
        name
        for name, effect in found.stages.effects.items()
        if effect.reads and not effect.writes and found.stages.levels.get(name, 1) == 2
    ]
    assert late and not set(late) & found.stages.once


def test_two_optimizers_whose_gradients_are_of_one_call_share_a_stage():
    first, second = variable("a", 4, 4), variable("b", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ first @ second))
        ga, gb = tape.gradient(loss, [first, second])
        first.assign_sub(0.1 * ga)
        second.assign_sub(0.2 * gb)
        return loss

    assert Found(step).stages.level == (1, 1)


def test_metrics_read_after_their_own_write_are_after_state():
    total, count, weight = variable("total"), variable("count"), variable("w", 4, 2)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        total.assign_add(loss)
        count.assign_add(1.0)
        return total / count

    found = Found(step)
    assert found.is_once(0)
    assert found.state == {"total", "count"}
    assert found.stages.update.isdisjoint(found.stages.once - found.stages.update)


def test_keras_logs_run_once():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    found = Found(lambda x, y: model.train_step((x, y)), X, tf.TensorSpec([None, 2], tf.float64))
    assert len(found.step.outputs) == 2
    assert all(found.is_once(k) for k in range(2))


def test_a_gradient_that_reaches_no_write_of_its_variable_is_dropped():
    """An inner step of MAML: the first gradient contributes to a value, not to a write."""
    weight = variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(tf.square(x @ weight))
            adapted = weight - 0.1 * inner.gradient(loss, weight)
            second = tf.reduce_mean(tf.square(x @ adapted))
        weight.assign_sub(0.1 * outer.gradient(second, weight))
        return second

    found = Found(step)
    assert found.synchronised == ["w"]
    last = [n.name for n in found.step.graph_def.node if n.op == "AssignSubVariableOp"]
    assert found.stages.update.issuperset(last)
    assert found.updated == {"w"}


def test_a_norm_of_a_gradient_is_not_an_update_of_the_variable():
    weight, other = variable("w", 4, 1), variable("other", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight + x @ other))
        gw, go = tape.gradient(loss, [weight, other])
        weight.assign_sub(0.1 * gw)
        return loss, tf.norm(go)

    assert Found(step).synchronised == ["w"]


def test_batch_norm_used_twice_is_state_of_compute():
    norm = layers.BatchNormalization()
    weight = variable("w", 4, 4)
    norm.build((None, 4))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(norm(norm(x @ weight, training=True), training=True)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    found = Found(step)
    moving = [n for n in found.step.by_name if "moving" in n]
    assert len(moving) == 2 and found.state == set(moving)
    assert len(found.stages.state_writes) == 4


def test_nothing_of_a_step_without_gradients_runs_once():
    count = variable("count")

    def step(x):
        count.assign_add(1.0)
        return tf.reduce_mean(x)

    item = capture_function(step, (X,), [0]).step
    stages = find_stages(item)
    assert stages.once == frozenset() and stages.gradients == ()
    assert written_handles(item) == {item.by_name["count"].handle}


def test_writes_before_a_node_are_told_in_order():
    found = Found(gan())
    second = next(w for w in found.stages.writes if found.names([w]) == {"maker"})
    critic = found.step.by_name["critic"].handle
    assert [found.names([w]) for w in found.stages.writes_before(second, critic)] in ([{"critic"}], [])
    reads = [n for n, e in found.stages.effects.items() if critic in e.reads and found.stages.level_of(n) == 2]
    assert all(len(found.stages.writes_before(r, critic)) == 1 for r in reads if not found.stages.effects[r].writes)
