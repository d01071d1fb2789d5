"""Every cotangent equals one device's: steps that clip it, read it or use it as data train as on one device."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.names import node_of
from autodist.graph.parts import PendingReductionKind
from autodist.graph.step import ALL_EXAMPLES
from autodist.kernels import Context, Fetching, rewrite
from autodist.kernels.normalise.reduce_before_postprocessing import ReduceBeforePostprocessing
from autodist.kernels.pipeline import KERNELS
from autodist.kernels.replicate.replicate import Replicate
from tests.unit.kernels import cotangent_steps as steps
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, train
from tests.unit.kernels.pairs import pairs

every_shape = pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
LAYOUTS = {"1x2": ((1, 2), False), "2x1-own": ((2, 1), False), "2x2-global": ((2, 2), True)}
"""Workers and replicas, and True if each worker's feed is the global batch."""


def batches():
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(count, 3)),) for count in (7, 1)]


@lru_cache(maxsize=2)  # for all shapes, of a worker's batches and of global ones
def on_one_device(make, is_global, count=2):
    step = make()
    captured = capture(step, *batches()[0], is_global=is_global)
    return captured, one_device(captured, step, batches()[:count])


LOOKING = [
    steps.plain, steps.clip_per_example, steps.clip_in_mean_and_sum, steps.clip_gradient_of_weights, steps.adversarial,
    steps.gradient_penalty, steps.virtual_adversarial, steps.in_two_calls, steps.through_a_mean, steps.two_groups,
    steps.looked_at, steps.by_vectorized_map,
]  # fmt: skip


@pytest.mark.feature("function", "loss: gradient penalties")
@pytest.mark.feature("function", "loss: adversarial examples (FGM, VAT)")
@pytest.mark.feature("function", "loss: gradients clipped within the backward pass")
@pytest.mark.parametrize("make, layout", pairs(LOOKING, LAYOUTS))
def test_steps_that_inspect_cotangents_train_as_on_one_device(make, layout, caplog):
    shape, is_global = LAYOUTS[layout]
    with caplog.at_level(logging.INFO, "autodist"):
        captured, alone = on_one_device(make, is_global)
        found = train(captured, plan(captured.step, *shape), batches())
    assert_same(found, alone, rtol=1e-9)
    assert "not known" not in caplog.text


def test_gradients_that_lead_on_to_others_are_reduced_as_they_are():
    """In batch normalisation that of the shift is part of the way to that of the layer before it."""
    layers = [keras.layers.Dense(4, dtype="float64"), keras.layers.BatchNormalization(dtype="float64")]
    model = keras.Sequential([keras.Input((3,), dtype="float64"), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    item = capture(step, *batches()[0]).step
    assert ReduceBeforePostprocessing().apply(item, Context(plan(item, 1, 2), 0)).gradients == item.gradients


@every_shape
def test_parts_of_which_a_mask_leaves_nothing_give_no_gradient(shape):
    captured, alone = on_one_device(steps.clip_under_a_mask, False, 1)
    assert_same(train(captured, plan(captured.step, *shape), batches()[:1]), alone, rtol=1e-9)


OWNED = [steps.clip_per_example, steps.adversarial, steps.two_groups]
SERVERS_AND_FEEDS = {"own": (0, False), "global": (0, True), "server-own": (1, False), "server-global": (1, True)}


@pytest.mark.parametrize("make, layout", pairs(OWNED, SERVERS_AND_FEEDS))
def test_parameter_servers_too(make, layout):
    servers, is_global = SERVERS_AND_FEEDS[layout]
    captured, alone = on_one_device(make, is_global)
    owners = {gradient.variable: k % 2 for k, gradient in enumerate(captured.step.gradients)}
    found = train(captured, plan(captured.step, 2, 1, owners, servers=servers), batches())
    assert_same(found, alone, rtol=1e-9)


def test_an_asynchronous_worker_sees_its_own_batch_as_the_whole():
    step = steps.clip_per_example()
    captured = capture(step, *batches()[0])
    item = replicated(captured, plan(captured.step, 2, 1, {"w": 0}, asynchronous=True))
    assert [pending.weight for pending in item.reductions if pending.kind is PendingReductionKind.GRADIENT] == [None]
    assert not [pending for pending in item.reductions if pending.kind is PendingReductionKind.LOSS]


def replicated(captured, strategy, worker=0):
    """The step as `Replicate` leaves it."""
    position = next(k for k, kernel in enumerate(KERNELS) if isinstance(kernel, Replicate))
    return rewrite(captured.step, Context(strategy, worker), kernels=KERNELS[: position + 1])


def reductions_of(make, is_global, example=None):
    captured = capture(make(), batches()[0][0] if example is None else example, is_global=is_global)
    step = replicated(captured, plan(captured.step, 2, 1))
    asked = [pending for pending in step.reductions if pending.kind is PendingReductionKind.LOSS]
    divided = [
        pending
        for pending in step.reductions
        if pending.kind is PendingReductionKind.GRADIENT and pending.weight is not None
    ]
    return len(asked), len(divided), node_of(ALL_EXAMPLES) in step.graph_index.nodes


def test_a_mean_over_what_each_worker_feeds_costs_no_exchange():
    assert reductions_of(steps.plain, is_global=False) == (0, 1, False)


def test_of_global_batches_nothing_is_divided_after_the_sum():
    assert reductions_of(steps.plain, is_global=True) == (0, 0, True)
    assert reductions_of(steps.clip_per_example, is_global=True) == (0, 0, True)


def test_the_whole_is_asked_for_where_a_cotangent_is_looked_at():
    assert reductions_of(steps.clip_per_example, is_global=False) == (1, 0, False)
    assert reductions_of(steps.looked_at, is_global=False) == (1, 0, False)


def test_the_whole_is_asked_for_where_a_cotangent_is_in_half_precision():
    w = tf.Variable(np.ones((3, 2), "float32"))

    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.cast(x, tf.float16) @ tf.cast(w, tf.float16)
            loss = tf.reduce_mean(tf.square(tf.cast(hidden, tf.float32) - 1.0))
        w.assign_sub(tape.gradient(loss, w))
        return loss

    assert reductions_of(lambda: step, is_global=False, example=np.ones((4, 3), "float32")) == (1, 0, False)


@pytest.mark.feature(
    "function", "loss: a part of a weight's gradient changed within the backward pass", refused="RewriteError"
)
def test_a_function_of_a_part_of_a_gradient_is_refused_by_name():
    captured = capture(steps.cap_gradient_of_penalty(), *batches()[0])
    with pytest.raises(
        RewriteError, match=r"the gradient of w is computed by Minimum .*replica.*Apply it to the result"
    ):
        train(captured, plan(captured.step, 1, 2), batches())


def test_a_clipped_gradient_of_weights_is_reduced_before_it_is_clipped():
    captured = capture(steps.clip_gradient_of_weights(), *batches()[0])
    step = replicated(captured, plan(captured.step, 2, 1))
    (gradient,) = step.gradients
    assert step.graph_index.nodes[node_of(gradient.tensors[0])].op == "MatMul"
    assert "clip_by_norm" in captured.step.gradients[0].tensors[0]


def test_one_replica_is_left_as_it_is():
    captured = capture(steps.cap_gradient_of_penalty(), *batches()[0])
    assert replicated(captured, plan(captured.step, 1, 1)).gradients == captured.step.gradients


def test_sessions_that_fetch_a_cotangent_send_what_others_send():
    """One worker fetches the gradient by the examples, another does not; the message between them has one name."""
    captured = capture(steps.looked_at(), *batches()[0])
    strategy = plan(captured.step, 2, 1)
    alone = replace(captured.step, outputs=captured.step.outputs[:1])
    position = next(k for k, kernel in enumerate(KERNELS) if isinstance(kernel, Replicate))
    travels = []
    for step in (captured.step, alone):
        made = rewrite(step, Context(strategy, 0, Fetching.BY_EACH), kernels=KERNELS[: position + 1])
        travels.append([(j.name, j.kind, j.dtype, j.weight_dtype) for j in made.reductions])
    assert travels[0] == travels[1] != []
