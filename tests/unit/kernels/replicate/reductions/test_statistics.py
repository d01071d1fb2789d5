"""Statistics other than means that a step returns or keeps: maxima, variances and the like are of the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.graph.parts import PendingReductionKind
from autodist.graph.step import Step
from autodist.kernels import Context, Fetching, rewrite
from autodist.kernels.communicate.buckets import make_buckets
from autodist.kernels.communicate.reduce_by_shuffle import ReduceByShuffle
from autodist.kernels.pipeline import KERNELS
from tests.unit.kernels.in_one_process import (
    EXAMPLES,
    Session,
    Trained,
    assert_same,
    capture,
    one_device,
    plan,
    returned_by,
    rewritten,
    train,
)
from tests.unit.kernels.in_one_session import in_one_session
from tests.unit.kernels.pairs import pairs

FIRST_REDUCTION = next(k for k, kernel in enumerate(KERNELS) if isinstance(kernel, ReduceByShuffle))

SHAPES = [(1, 2), (2, 1), (3, 1), (2, 2)]

Values = Callable[[tf.Tensor, tf.Tensor], object]


def step_that(values: Values) -> Callable[[tf.Tensor], object]:
    """A step of training that also returns `values(x, errors)`, with x of shape [n, 3] and errors of shape [n]."""
    weight = tf.Variable(np.random.default_rng(1).normal(size=(3, 1)), name="weight")

    def step(x: tf.Tensor) -> object:
        with tf.GradientTape() as tape:
            errors = tf.square(x @ weight)[:, 0]
            loss = tf.reduce_mean(errors)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return values(x, errors)

    return step


def batches(*sizes: int) -> list[tuple[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(3.0, 2.0, size=(n, 3)),) for n in sizes]


@lru_cache(maxsize=1)  # for all shapes
def on_one_device(values: Values) -> tuple[CapturedFunction, Trained]:
    step, data = step_that(values), batches(7, 4, 1)
    captured = capture(step, *data[0])
    return captured, one_device(captured, step, data)


def trained(values: Values, shape: tuple[int, int], servers: int = 0) -> tuple[Trained, Trained]:
    captured, alone = on_one_device(values)
    return train(captured, plan(captured.step, *shape, servers=servers), batches(7, 4, 1)), alone


def determination(x: tf.Tensor, errors: tf.Tensor) -> tf.Tensor:
    spread = tf.reduce_sum(tf.square(x[:, 0] - tf.reduce_mean(x[:, 0])))
    return 1 - tf.reduce_sum(errors) / (spread + 1.0)


def skewness(x: tf.Tensor, errors: tf.Tensor) -> tf.Tensor:
    off = errors - tf.reduce_mean(errors)
    return tf.reduce_mean((off / (tf.sqrt(tf.reduce_mean(tf.square(off))) + 0.1)) ** 3)


OUTPUTS: dict[str, Values] = {
    "max": lambda x, errors: tf.reduce_max(errors),
    "min": lambda x, errors: tf.reduce_min(x),
    "whole numbers": lambda x, errors: tf.reduce_max(tf.cast(x, tf.int32)),
    "any": lambda x, errors: tf.reduce_any(x > 6),
    "all": lambda x, errors: tf.reduce_all(x > -1),
    "product": lambda x, errors: tf.reduce_prod(0.5 + errors),
    "norm": lambda x, errors: tf.norm(x),
    "euclidean norm": lambda x, errors: tf.math.reduce_euclidean_norm(x),
    "l2 loss": lambda x, errors: tf.nn.l2_loss(x),
    "range": lambda x, errors: tf.reduce_max(x) - tf.reduce_min(x),
    "negated": lambda x, errors: -tf.reduce_max(-x),
    "as a number": lambda x, errors: tf.cast(tf.reduce_any(x > 6), tf.float64),
    "of a column": lambda x, errors: tf.reduce_max(x, 0)[1],
    "twice": lambda x, errors: tf.reduce_min(tf.reduce_max(x, 0)),
    "scaled max": lambda x, errors: tf.square(tf.reduce_max(x)) * tf.reduce_mean(errors),
    "variance": lambda x, errors: tf.math.reduce_variance(errors),
    "deviation": lambda x, errors: tf.math.reduce_std(x),
    "moments": lambda x, errors: tf.nn.moments(errors, 0),
    "logsumexp": lambda x, errors: tf.reduce_logsumexp(x),
    "skewness": skewness,
    "determination": determination,
    "deviation from the largest": lambda x, errors: tf.reduce_mean(x / tf.reduce_max(x)),
    "norm of a mean": lambda x, errors: tf.norm(tf.reduce_mean(x, 0)),
    "not a number": lambda x, errors: tf.reduce_max(tf.where(x > 5, np.float64(np.nan), x)),
}


ALONE = ("max", "any", "product", "variance", "skewness", "not a number")
"""One statistic of each kind that no other output contributes to."""


@pytest.mark.parametrize("name, shape", pairs(ALONE, SHAPES))
def test_an_output_is_that_of_the_whole_batch(
    name: str, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "autodist"):
        found, expected = trained(OUTPUTS[name], shape)
    assert_same(found, expected, 1e-10)
    assert not caplog.records


def test_all_outputs_of_a_step_are_those_of_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autodist"):
        found, expected = trained(lambda x, errors: [values(x, errors) for values in OUTPUTS.values()], SHAPES[-1])
    assert_same(found, expected, 1e-10)
    assert not caplog.records


def test_workers_without_replicas_have_it_too() -> None:
    values = lambda x, errors: (tf.reduce_max(x), tf.math.reduce_std(x), tf.reduce_all(x > 0))  # noqa: E731
    assert_same(*trained(values, (2, 2), servers=1), rtol=1e-10)


def most_so_far() -> Values:
    most = tf.Variable(0.0, dtype=tf.float64, name="state", trainable=False)
    return lambda x, errors: most.assign(tf.maximum(most, tf.reduce_max(errors)))


def declared_most() -> Values:
    """As a Keras metric keeps it."""
    most = tf.Variable(0.0, dtype=tf.float64, name="state", trainable=False, aggregation=tf.VariableAggregation.SUM)
    return lambda x, errors: most.assign(tf.maximum(most, tf.reduce_max(errors)))


def least_by_column() -> Values:
    least = tf.Variable(np.full(3, 100.0), name="state", trainable=False)
    return lambda x, errors: least.assign(tf.minimum(least, tf.reduce_min(x, 0)))


def added_largest() -> Values:
    total = tf.Variable(0.0, dtype=tf.float64, name="state", trainable=False)
    return lambda x, errors: total.assign_add(tf.reduce_max(x))


def largest_whole_number() -> Values:
    most = tf.Variable(0, dtype=tf.int64, name="state", trainable=False)
    return lambda x, errors: most.assign(tf.cast(tf.reduce_max(errors), tf.int64))


def whether_ever() -> Values:
    seen = tf.Variable(False, name="state", trainable=False)
    return lambda x, errors: seen.assign(seen | tf.reduce_any(x > 7))


def moving_variance() -> Values:
    moving = tf.Variable(np.ones(3), name="state", trainable=False)
    return lambda x, errors: moving.assign(0.9 * moving + 0.1 * tf.math.reduce_variance(x, 0))


def written_under_a_largest_value() -> Values:
    count = tf.Variable(0.0, dtype=tf.float64, name="state", trainable=False)

    def write(x: tf.Tensor, errors: tf.Tensor) -> tf.Tensor:
        return tf.cond(
            tf.reduce_max(x) > 6, lambda: count.assign_add(tf.reduce_mean(errors)), lambda: tf.identity(count)
        )

    return write


@cache
def beside_a_mean(make: Callable[[], Values]) -> Values:
    values = make()
    return lambda x, errors: [values(x, errors), tf.reduce_mean(errors)][1]


STATES = [
    most_so_far, declared_most, least_by_column, added_largest, largest_whole_number, whether_ever, moving_variance,
    written_under_a_largest_value,
]  # fmt: skip


@pytest.mark.parametrize("make, shape", pairs(STATES, SHAPES))
def test_the_statistics_of_a_step_are_those_of_one_device(
    make: Callable[[], Values], shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = trained(beside_a_mean(make), shape)
    for name, value in expected.variables[0].items():
        np.testing.assert_allclose(found.variable(name), value, rtol=1e-10, err_msg=name)
    assert not caplog.records


def fetched_by(worker: int, values: Values, shape: tuple[int, int], x: np.ndarray) -> list[np.ndarray]:
    """Returns a worker's fetches for its own part."""
    captured = capture(step_that(values), x)
    value = captured.sources[0].numpy()
    step = rewrite(captured.step, Context(plan(captured.step, *shape), worker, Fetching.BY_EACH))
    assert not [reduce for reduce in step.reductions if reduce.name.startswith("output")]
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        tf.import_graph_def(in_one_session(step.graph_def), name="")
        weight = graph.get_tensor_by_name(f"{step.by_name['weight'].handle}:0")
        session.run(tf.raw_ops.AssignVariableOp(resource=weight, value=value))
        return session.run(returned_by(step), {next(iter(captured.step.inputs)): x, EXAMPLES: len(x)})


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (2, 3)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_session_fetches_that_of_its_own_workers_replicas(shape: tuple[int, int]) -> None:
    values = lambda x, errors: (  # noqa: E731
        tf.reduce_max(x), tf.reduce_any(x > 6), tf.math.reduce_std(x), tf.reduce_logsumexp(x), tf.nn.moments(x, 0)[1],
        tf.reduce_max(x, 0), tf.sqrt(tf.reduce_mean(x, 0) ** 2),
    )  # fmt: skip
    [(x,)] = batches(5)
    expected = [np.asarray(v) for v in values(tf.constant(x), tf.constant(x[:, 0]))]
    for found, wanted in zip(fetched_by(0, values, shape, x), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_a_loss_in_which_examples_see_one_another_is_logged_as_it_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    weight = tf.Variable(np.ones((3, 1)), name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            mean, variance = tf.nn.moments(x @ weight, 0, keepdims=True)
            loss = tf.reduce_mean(tf.abs(x @ weight - mean) / tf.sqrt(variance + 1))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    [(x,)] = batches(6)
    captured = capture(step, x)
    [[[one], [other]]] = train(captured, plan(captured.step, 2, 1), [(x,)]).outputs
    parts = [p @ np.ones((3, 1)) for p in np.split(x, 2)]
    wanted = np.mean([np.mean(np.abs(p - p.mean()) / np.sqrt(p.var() + 1)) for p in parts])
    assert one == other == pytest.approx(wanted, rel=1e-12)


def test_places_of_largest_values_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    trained(lambda x, errors: tf.argmax(errors), (2, 1))
    assert "taken from each worker's first replica" in caplog.text


def test_reductions_that_wait_for_one_another_do_not_share_a_bucket() -> None:
    [(x,)] = batches(6)
    captured = capture(step_that(lambda x, errors: (tf.math.reduce_variance(x), tf.math.reduce_variance(errors))), x)
    session = Session(captured, plan(captured.step, 2, 1))
    found = session.train([(x,)], limit_ms=30_000).outputs[0][0]
    np.testing.assert_allclose(found[0], x.var(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("values", [lambda x, errors: tf.reduce_mean(errors), lambda x, errors: tf.reduce_sum(errors)])
def test_it_is_told_whether_any_worker_has_examples_beside_what_is_reduced_anyway(
    values: Values, shape: tuple[int, int]
) -> None:
    captured = capture(step_that(values), *batches(4)[0])
    session = Session(captured, plan(captured.step, *shape))
    kept = [
        name for step in rewritten(captured, session.strategy, KERNELS[:FIRST_REDUCTION]) for name in bucketed(step)
    ]
    assert len(set(kept)) == 1, "the number shares the output's bucket"
    names = [f"worker_{w}/{item.outputs[-1]}" for w, item in enumerate(session.steps)]
    assert all(step.counts_examples for step in session.steps)
    some = session.fetch_once(batches(1)[0], names)
    none = Session(captured, session.strategy).fetch_once(batches(0)[0], names)
    assert all(value > 0 for value in some)
    assert none == [0.0] * shape[0]


def bucketed(step: Step) -> list[int]:
    """Returns for each bucket of values other than gradients the number of its reductions."""
    own = [reduce for reduce in step.reductions if reduce.kind is PendingReductionKind.STATE]
    return [len(bucket.reductions) // len(own) for bucket in make_buckets(own, lambda reduce: None)]
