"""Outputs: the means and sums that a step returns, and their summaries, are those of the whole batch."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from autodist.kernels import Context, Fetching, rewrite
from tests.unit.kernels.in_one_process import EXAMPLES, capture, one_device, plan, rewritten, train
from tests.unit.kernels.in_one_session import in_one_session
from tests.unit.kernels.replicate.steps import batches, check, every_shape, hardest_shape, variable

v1 = tf.compat.v1


def summarised(values):
    """A step that returns its merged summaries, and their text again; `values` returns the summarised values."""
    weight = tf.Variable(np.ones((4, 2)), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        shown = [tf.raw_ops.ScalarSummary(tags=name, values=v) for name, v in values(x, loss).items()]
        return tf.raw_ops.MergeSummary(inputs=shown)

    return step


def means_and_sums(x, loss):
    return {
        "loss": loss,
        "total": tf.reduce_sum(x),
        "root": tf.sqrt(loss),
        "fixed": tf.constant(2.0),
        "most": tf.reduce_max(x),
    }


def shown_in(text) -> dict[str, float]:
    text = text if isinstance(text, bytes) else text.item()
    return {value.tag: value.simple_value for value in v1.Summary.FromString(text).value}


BATCHES = [[np.random.default_rng(k).normal(size=(count, 4))] for k, count in enumerate((7, 8, 1))]


@pytest.mark.feature("function", "fetches: merged summaries")
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)])
def test_a_summary_that_a_function_returns_is_that_of_all_workers(cluster, caplog):
    step = summarised(means_and_sums)
    captured = capture(step, *BATCHES[0])
    with caplog.at_level(logging.WARNING, "autodist"):
        found = train(captured, plan(captured.step, *cluster, servers=int(cluster == (2, 2))), BATCHES)
    for outputs, [[expected]] in zip(found.outputs, one_device(captured, step, BATCHES).outputs, strict=True):
        for [text] in outputs:
            assert shown_in(text) == pytest.approx(shown_in(expected), rel=1e-6)  # a summary holds them in float32
    assert not caplog.records


def test_a_summary_that_a_session_fetches_is_that_of_its_own_workers_replicas():
    captured = capture(summarised(means_and_sums), *BATCHES[0])
    context = Context(plan(captured.step, 2, 2), 0, Fetching.BY_EACH)
    step = rewrite(captured.step, context)
    assert not [pending for pending in step.reductions if pending.name.startswith("output")]
    x = BATCHES[0][0]
    with tf.Graph().as_default() as graph, v1.Session() as session:
        tf.import_graph_def(in_one_session(step.graph_def), name="")
        weight = graph.get_tensor_by_name(f"{step.by_name['weight'].handle}:0")
        session.run(tf.raw_ops.AssignVariableOp(resource=weight, value=np.ones((4, 2))))
        feeds = {next(iter(captured.step.inputs)): x, EXAMPLES: len(x)}
        [text] = session.run([step.outputs[0]], feeds)
    shown = shown_in(text)
    loss = np.mean(np.square(x @ np.ones((4, 2))))
    assert shown == pytest.approx(
        {"loss": loss, "total": x.sum(), "root": loss**0.5, "fixed": 2.0, "most": x.max()}, rel=1e-6
    )


def test_a_summary_of_what_is_made_of_rows_is_made_of_all_rows_of_the_worker(caplog):
    captured = capture(summarised(lambda x, loss: {"loss": loss, "last": x[-1, 0]}), *BATCHES[0])
    with caplog.at_level(logging.WARNING, "autodist"):
        found = train(captured, plan(captured.step, 1, 2), BATCHES[:1])
    [[[text]]] = found.outputs
    assert shown_in(text)["last"] == pytest.approx(BATCHES[0][0][-1, 0], rel=1e-6)
    assert not caplog.records


def test_of_merged_summaries_one_made_of_rows_shows_each_workers_own_and_it_is_told(caplog):
    captured = capture(summarised(lambda x, loss: {"loss": loss, "last": x[-1, 0]}), *BATCHES[0])
    with caplog.at_level(logging.WARNING, "autodist"):
        found = train(captured, plan(captured.step, 2, 1), BATCHES[:1])
    x = BATCHES[0][0]
    for [text], last in zip(found.outputs[0], (x[3, 0], x[-1, 0]), strict=True):
        shown = {"loss": np.mean(np.square(x @ np.ones((4, 2)))), "last": last}
        assert shown_in(text) == pytest.approx(shown, rel=1e-6)
    assert "shows x:0 of each worker's own examples, and not of the whole batch" in caplog.text


@hardest_shape
def test_a_function_of_means_that_a_step_returns_is_that_of_the_whole_batch(shape, caplog):
    weight = variable("w", 4, 2)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        total, squares = tf.reduce_sum(x), tf.reduce_sum(tf.square(x))
        spread = tf.sqrt(tf.reduce_mean(tf.square(x)) - tf.square(tf.reduce_mean(x)))
        return tf.sqrt(loss), 10.0 * tf.math.log(1.0 / loss), total * total / squares, spread

    with caplog.at_level(logging.WARNING, "autodist"):
        check(step, batches(6, 5, 1), shape)
    assert not caplog.records


@pytest.mark.parametrize("is_root", [False, True])
def test_it_is_told_of_outputs_in_which_examples_see_one_another(is_root, caplog):
    weight = variable("w", 4, 2)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        deep = x - tf.reduce_mean(x, 0, keepdims=True)
        for _ in range(80):  # like a network, which is not computed twice
            deep = tf.tanh(deep)
        spread = tf.reduce_mean(tf.square(deep))
        return loss, tf.sqrt(spread) if is_root else spread

    captured = capture(step, *batches(6)[0])
    with caplog.at_level(logging.INFO, "autodist"):
        rewritten(captured, plan(captured.step, 1, 2))
    (told,) = [record.getMessage() for record in caplog.records]
    assert captured.step.outputs[1] in told and "not that of the whole batch" in told


@every_shape
def test_rows_that_a_step_returns_come_in_order(shape):
    weight = variable("w", 4, 2)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ weight))
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return x @ weight

    data = batches(5, 1)
    captured = capture(step, *data[0])
    found = train(captured, plan(captured.step, *shape), data)
    expected = one_device(captured, step, data)
    for outputs, (wanted,) in zip(found.outputs, expected.outputs, strict=True):
        rows = np.concatenate([mine[0] for mine in outputs])
        np.testing.assert_allclose(rows, wanted[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "fetching", "says"),
    [((2, 1), Fetching.BY_EACH, 0), ((2, 1), Fetching.BY_ALL, 2), ((1, 2), Fetching.BY_EACH, 1)],
)
def test_an_output_of_unknown_kind_is_told_of_where_replicas_are_reduced(shape, fetching, says, caplog):
    weight = variable("w", 4, 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(1e-3 * tape.gradient(loss, weight))
        return tf.reduce_mean(tf.matmul(x, x, transpose_b=True))

    captured = capture(step, np.ones((1, 4)))
    strategy = plan(captured.step, *shape)
    with caplog.at_level(logging.WARNING, "autodist"):
        for worker in range(shape[0]):
            rewrite(captured.step, Context(strategy, worker, fetching))
    assert caplog.text.count("is averaged over the replicas") == says


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)])
def test_a_scalar_weights_gradient_is_that_of_the_whole_batch_where_a_loop_makes_it(cluster, caplog):
    """The reduction of a loop's gradient outputs is unknown; a variable's gradient is still a sum."""
    weight = tf.Variable(1.0, dtype=tf.float64, name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            _, made = tf.while_loop(lambda k, h: k < 4, lambda k, h: (k + 1, 0.5 * h + weight * x[:, k]), (0, x[:, 0]))
            loss = tf.reduce_mean(made**2)
        gradient = tape.gradient(loss, weight)
        weight.assign_sub(0.1 * gradient)
        return gradient

    captured = capture(step, *BATCHES[0])
    with caplog.at_level(logging.WARNING, "autodist"):
        found = train(captured, plan(captured.step, *cluster), BATCHES)
    for outputs, [[expected]] in zip(found.outputs, one_device(captured, step, BATCHES).outputs, strict=True):
        assert [float(gradient) for [gradient] in outputs] == pytest.approx([float(expected)] * cluster[0], rel=1e-12)
    assert not caplog.records
