"""In-step all-reduces equal the sums of the whole batch, and so do gradients through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.errors import RewriteError, StrategyError
from autodist.graph.in_step_all_reduce import SUM_NAME
from autodist.graph.parts import PendingReductionKind
from autodist.kernels import Context, rewrite
from autodist.kernels.communicate.buckets import make_buckets
from autodist.kernels.communicate.reduce_by_shuffle import ReduceByShuffle
from autodist.kernels.pipeline import KERNELS
from autodist.synchronizers import LocalSteps
from tests.unit.kernels import whole_sum_steps as steps
from tests.unit.kernels.in_one_process import Trained, assert_same, capture, one_device, plan, train


def batches(*sizes: int, rank: int = 2) -> list[tuple[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(3.0, 2.0, size=(n, *[5] * (rank - 2), 3)),) for n in sizes]


@lru_cache(maxsize=1)  # for all shapes
def on_one_device(
    make: Callable[[], steps.Step], sizes: tuple[int, ...], rank: int
) -> tuple[CapturedFunction, Trained]:
    step, data = make(), batches(*sizes, rank=rank)
    captured = capture(step, *data[0])
    return captured, one_device(captured, step, data)


def trained(
    make: Callable[[], steps.Step],
    shape: tuple[int, int],
    sizes: tuple[int, ...] = (8, 7, 3),
    rank: int = 2,
    **options: object,
) -> tuple[Trained, Trained]:
    """Returns the results of the replicas, and those of one device."""
    captured, expected = on_one_device(make, sizes, rank)
    found = train(captured, plan(captured.step, *shape, **options), batches(*sizes, rank=rank))
    if shape[0] > 1:  # rows that a step returns are each worker's own
        found, expected = (replace(t, outputs=_scalars(t.outputs)) for t in (found, expected))
    return found, expected


def _scalars(outputs: list[list[list[np.ndarray]]]) -> list[list[list[np.ndarray]]]:
    return [[[value for value in mine if not np.ndim(value)] for mine in of_workers] for of_workers in outputs]


@pytest.mark.feature("function", "model: synchronized batch normalisation")
@pytest.mark.parametrize(
    ("make", "rank", "shape"),
    [
        (steps.one_layer, 2, (1, 2)),
        (steps.several_layers, 2, (2, 2)),
        (steps.of_sequences, 3, (2, 1)),
        (steps.renormalised, 2, (2, 1)),
        (steps.masked, 3, (2, 2)),
        (steps.penalised, 2, (2, 1)),
        (steps.adversaries, 2, (2, 1)),
        (steps.masked_loss, 2, (2, 2)),
        (steps.asked_of_distribute, 2, (2, 2)),
        (steps.averaged_by_distribute, 2, (2, 2)),
        (steps.attacked_through_sums, 2, (2, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_training_is_that_of_one_device(make: Callable[[], steps.Step], rank: int, shape: tuple[int, int]) -> None:
    assert_same(*trained(make, shape, rank=rank), 1e-10)


@pytest.mark.feature("function", "loss: of examples compared with each other, gathered")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (steps.contrasted, (2, 2)),
        (steps.contrasted_by_row, (3, 1)),
        (steps.decorrelated, (1, 2)),
        (steps.hardest, (2, 1)),
        (steps.attacked, (2, 2)),
        (steps.standardised, (2, 2)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_losses_of_gathered_rows_are_those_of_one_device(
    make: Callable[[], steps.Step], shape: tuple[int, int]
) -> None:
    assert_same(*trained(make, shape), 1e-10)


def test_a_worker_without_replicas_gathers_nothing_of_its_own() -> None:
    captured, _ = on_one_device(steps.contrasted, (8, 7, 3), 2)
    owners = {g.variable: k % 3 for k, g in enumerate(captured.step.gradients)}
    assert_same(*trained(steps.contrasted, (2, 1), owners=owners, servers=1), 1e-10)


@pytest.mark.parametrize("arranged", [lambda x: tf.concat([x, 2 * x], 0), lambda x: tf.reduce_mean(x, 0)])
def test_rows_that_are_no_examples_in_their_order_are_refused(arranged: Callable[[tf.Tensor], tf.Tensor]) -> None:
    w = tf.Variable(np.ones(3), name="w")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(steps.gathered(arranged(x * w)) ** 2)
        w.assign_sub(tape.gradient(loss, w))

    captured = capture(step, *batches(4)[0])
    with pytest.raises(RewriteError, match="gathers the rows of all replicas.*along axis 0.*Gather what the model"):
        rewrite(captured.step, Context(plan(captured.step, 2), 0))


def test_owners_and_a_worker_without_replicas() -> None:
    captured, _ = on_one_device(steps.one_layer, (8, 7, 3), 2)
    owners = {g.variable: k % 3 for k, g in enumerate(captured.step.gradients)}
    assert_same(*trained(steps.one_layer, (2, 1), owners=owners, servers=1), 1e-10)


def test_sums_of_one_layer_travel_together() -> None:
    captured, _ = on_one_device(steps.several_layers, (8, 7, 3), 2)
    before = KERNELS[: next(k for k, kernel in enumerate(KERNELS) if isinstance(kernel, ReduceByShuffle))]
    step = rewrite(captured.step, Context(plan(captured.step, 2), 0), kernels=before)
    reductions = [pending for pending in step.reductions if pending.kind is PendingReductionKind.WHOLE]
    assert len(reductions) == 3 * 3 + 3 * 2  # sums, sums of squares and counts; of counts there is no gradient
    assert len(make_buckets(reductions, lambda pending: None)) == 2 * 3


def test_one_replica_alone_adds_up_nothing() -> None:
    captured, _ = on_one_device(steps.several_layers, (8, 7, 3), 2)
    step = rewrite(captured.step, Context(plan(captured.step), 0))
    assert not [node for node in step.graph_def.node if SUM_NAME in node.name]
    assert_same(*trained(steps.several_layers, (1, 1)))


def test_means_over_replicas_that_meet_single_examples_are_of_the_whole_batch() -> None:
    step, data = steps.centred_by_distribute(), batches(8, 7, 3)
    captured = capture(step, *data[0], is_split=True)
    assert_same(train(captured, plan(captured.step, 2), data), one_device(captured, step, data), 1e-10)


def test_means_over_replicas_of_sums_are_refused() -> None:
    w = tf.Variable(np.ones(3), name="w")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * w) * steps.mean_by_distribute(tf.reduce_sum(x))
        w.assign_sub(tape.gradient(loss, w))

    captured = capture(step, *batches(4)[0])
    with pytest.raises(RewriteError, match="asks for the mean over all replicas of Sum:0.*divide after it"):
        rewrite(captured.step, Context(plan(captured.step, 2), 0))


def test_sums_over_replicas_of_means_are_refused() -> None:
    w = tf.Variable(np.ones(3), name="w")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * w)
        w.assign_sub(tape.gradient(loss, w))
        return tf.distribute.get_replica_context().all_reduce("SUM", loss)

    captured = capture(step, *batches(4)[0])
    with pytest.raises(RewriteError, match="asks for the sum over all replicas of Mean:0.*needs ReduceOp.MEAN"):
        rewrite(captured.step, Context(plan(captured.step, 2), 0))


@pytest.mark.feature("function", "model: synchronized batch normalisation in a loop", refused="RewriteError")
def test_layers_in_a_loop_are_refused() -> None:
    w, layer = tf.Variable(np.ones(3), name="w"), steps.normalisation()
    layer.build([None, 3])

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            made = tf.while_loop(lambda k, y: k < 2, lambda k, y: (k + 1, layer(y, training=True)), (0, x))[1]
            loss = tf.reduce_mean(made * w)
        w.assign_sub(tape.gradient(loss, w))

    captured = capture(step, *batches(4)[0])
    with pytest.raises(RewriteError, match="within a loop or a condition.*synchronized=False"):
        rewrite(captured.step, Context(plan(captured.step, 1, 2), 0))


@pytest.mark.parametrize("make", [steps.one_layer, steps.contrasted])
def test_steps_that_wait_for_nobody_are_refused(make: Callable[[], steps.Step]) -> None:
    step, data = make(), batches(4)
    captured = capture(step, *data[0])
    owners = {g.variable: 0 for g in captured.step.gradients}
    with pytest.raises(StrategyError, match="synchronized=False.*sync: true"):
        rewrite(captured.step, Context(plan(captured.step, 2, owners=owners, asynchronous=True), 0))


@pytest.mark.parametrize(
    "pace",
    [
        {"owners": {"w": 0}, "asynchronous": True},
        {"owners": {"w": 0}, "staleness": 1},
        {"local": {"w": LocalSteps(2)}},
    ],
    ids=["asynchronous", "stale", "local steps"],
)
def test_a_mean_over_replicas_that_wait_for_nobody_is_refused_as_a_sum_is(pace: dict[str, object]) -> None:
    captured = capture(steps.averaged_by_distribute(), *batches(4)[0])
    with pytest.raises(StrategyError, match="asks for the mean over all replicas.*Leave all_reduce out.*sync: true"):
        rewrite(captured.step, Context(plan(captured.step, 2, **pace), 0))
