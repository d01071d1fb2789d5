"""Inlined branches: one conditional uses variables of several workers, or state that differs between replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients
from autodist.errors import RewriteError, StrategyError
from autodist.graph.ops import writes_rows
from autodist.kernels import Context, find_holders, rewrite
from autodist.kernels.normalise.inline_branches import InlineBranches
from autodist.placement.partitioning import Partitioning
from tests.unit.kernels.graphs_in_one_process import Cluster
from tests.unit.kernels.in_one_process import (
    CapturedFunction,
    Trained,
    assert_same,
    capture,
    one_device,
    plan,
    rewritten,
    train,
)
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import cut_in_strategy, sharded_plan

pytestmark = pytest.mark.usefixtures("keras_in_float64")

optimizers = keras.optimizers
v1 = tf.compat.v1

OPTIMIZERS = {
    "accumulated momentum": lambda: optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=2),
    "accumulated adam": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "accumulated and clipped": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3, global_clipnorm=0.1),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01), dynamic_growth_steps=3),
    "scaled momentum": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.01, momentum=0.9), dynamic_growth_steps=3
    ),
    "scaled adam": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=3),
    "scaled adagrad": lambda: optimizers.LossScaleOptimizer(optimizers.Adagrad(0.1), dynamic_growth_steps=3),
    "scaled, accumulated, averaged": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2)
    ),
}

OWNERS = {
    "several owners": {"table": 0, "kernel": 1, "bias": 0},
    "servers": {"table": 2, "kernel": 3, "bias": 2},
    "one owner and every worker": {"table": 1},
}

LAYOUTS = [
    ("accumulated momentum", ("several owners", 1)),
    ("accumulated adam", ("servers", 1)),
    ("accumulated and clipped", ("one owner and every worker", 1)),
    ("scaled", ("servers", 2)),
    ("scaled momentum", ("several owners", 2)),
    ("accumulated and clipped", ("one owner and every worker", 2)),
    ("scaled adam", ("one owner and every worker", 2)),
    ("scaled adagrad", ("one owner and every worker", 2)),
    ("scaled, accumulated, averaged", ("one owner and every worker", 2)),
]
"""Optimizers, each with owners and the number of replicas of a worker. In the last layout, the hardest, owners hold
some variables and each worker the others: for the optimizers that contain the others, or add rows.
"""


def make_step(optimizer: keras.optimizers.Optimizer) -> Callable[..., tf.Tensor]:
    """Looks rows up and applies a dense layer; the loss is scaled as the optimizer requires."""
    rng = np.random.default_rng(0)
    table = keras.Variable(rng.normal(size=(12, 4)), name="table")
    kernel = keras.Variable(rng.normal(size=(4, 3)), name="kernel")
    bias = keras.Variable(rng.normal(size=3), name="bias")
    bias.constraint = keras.constraints.NonNeg()
    trained = [table, kernel, bias]
    optimizer.build(trained)

    def step(ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square((tf.gather(table.value, ids) * x) @ kernel.value + bias.value))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in trained])
        optimizer.apply_gradients(zip(gradients, trained, strict=True))
        return loss

    return step


def make_batches(overflows: bool) -> list[list[np.ndarray]]:
    """Seven batches; in the fifth, the gradient of the last example, and so of the last replica alone, may overflow."""
    rng = np.random.default_rng(1)
    batches = [[rng.integers(0, 12, 7), rng.normal(size=(7, 4))] for _ in range(7)]
    batches[4][1][6] *= 1e200 if overflows else 1
    return batches


def captured_step(optimizer: str) -> CapturedFunction:
    return on_one_device(optimizer)[0]


@cache
def on_one_device(optimizer: str) -> tuple[CapturedFunction, list[list[np.ndarray]], Trained]:
    batches = make_batches(overflows="scaled" in optimizer)
    step = make_step(OPTIMIZERS[optimizer]())
    captured = capture(step, *batches[0])
    return captured, batches, one_device(captured, step, batches)


@pytest.mark.feature("function", "optimizer: gradient accumulation")
@pytest.mark.feature("function", "precision: loss scaling")
@pytest.mark.parametrize("optimizer, layout", LAYOUTS)
def test_optimizers_with_conditions_train_what_one_device_does(optimizer, layout):
    owners, replicas = layout
    captured, batches, expected = on_one_device(optimizer)
    strategy = plan(captured.step, 2, replicas, OWNERS[owners], servers=2 if owners == "servers" else 0)
    assert_same(train(captured, strategy, batches), expected, rtol=1e-9)
    [updates] = [value for name, value in expected.variables[0].items() if name.endswith("/iteration")]
    assert updates == (6 if "scaled" in optimizer else 7)  # the step that overflowed made none


@pytest.mark.parametrize("optimizer", ["accumulated adam", "scaled adam"])
def test_shards_of_several_owners_train_what_one_device_does(optimizer):
    captured, batches, expected = on_one_device(optimizer)
    strategy = plan(captured.step, 2, 1, {"kernel": 1})
    cut_in_strategy(strategy, "table", Partitioning(0, (7, 5)), [0, 1])
    assert_same(train(captured, strategy, batches), expected, rtol=1e-9)


@pytest.mark.parametrize("optimizer", ["accumulated adam", "scaled adam"])
def test_slots_and_accumulators_stand_with_their_variable(optimizer):
    captured = captured_step(optimizer)
    strategy = plan(captured.step, 2, 1, OWNERS["several owners"])
    step = rewritten(captured, strategy)[0]
    kinds = ["", "_momentum", "_velocity", "_gradient_accumulator"]
    for name, owner in OWNERS["several owners"].items():
        found = {v for v in step.owners if v.rpartition("/")[2] in [name + kind for kind in kinds]}
        assert {step.owners[v] for v in found} == {owner}
        assert len(found) == (4 if optimizer == "accumulated adam" else 3)
    placed = find_holders(captured.step, strategy)
    assert {name: one.slices[0].owner for name, one in placed.items() if name in step.owners} == step.owners


def test_each_worker_updates_its_own_variables_alone():
    captured = captured_step("accumulated adam")
    for worker, step in enumerate(rewritten(captured, plan(captured.step, 2, 1, OWNERS["several owners"]))):
        assert not step.graph_index.of_op("If")
        written = {step.by_handle[h].name for effect in step.graph_index.effects.values() for h in effect.writes}
        mine = {name for name, owner in OWNERS["several owners"].items() if owner == worker}
        assert written & OWNERS["several owners"].keys() == mine


def test_rows_that_one_branch_adds_stay_rows():
    captured = captured_step("scaled")
    step = rewritten(captured, plan(captured.step, 2, 1, OWNERS["several owners"]))[0]
    handle = step.by_name["table"].handle
    touching = [
        step.graph_index.nodes[name].op for name, e in step.graph_index.effects.items() if handle in e.reads | e.writes
    ]
    assert [op for op in touching if writes_rows(op)]
    assert not {"AssignVariableOp", "ReadVariableOp"} & set(touching)


@pytest.mark.parametrize("owners", [{}, {"table": 1, "kernel": 1, "bias": 1}])
def test_no_op_where_all_variables_are_held_alike(owners):
    captured = captured_step("accumulated adam")
    context = Context(plan(captured.step, 2, 1, owners), 0)
    assert InlineBranches().apply(captured.step, context) is captured.step


@pytest.mark.feature(
    "function", "optimizer: gradient accumulation, under asynchronous servers", refused="StrategyError"
)
def test_an_asynchronous_update_stays_under_one_condition_and_is_refused():
    captured = captured_step("accumulated adam")
    with pytest.raises(StrategyError, match="are written by one operation"):
        rewritten(captured, plan(captured.step, 2, 1, OWNERS["several owners"], asynchronous=True))


def test_an_update_that_prints_in_one_branch_is_refused_by_name():
    first, second = (tf.Variable(np.ones(3), name=name) for name in ("first", "second"))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * first * second)
        gradients = tape.gradient(loss, [first, second])
        if tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients]):
            first.assign_sub(gradients[0])
            second.assign_sub(gradients[1])
        else:
            tf.print("skipped")
        return loss

    captured = capture(step, np.ones((4, 3)))
    with pytest.raises(StrategyError, match=r"first, second are written under one condition \(cond\).*PrintV2") as told:
        rewrite(captured.step, Context(plan(captured.step, 2, 1, {"first": 0, "second": 1}), 0))
    assert "give the variables one owner" in str(told.value)


# -- state ---------------------------------------------------------------------------------------------------------


class State:
    """The state that the steps below keep in addition to their weights."""

    def __init__(self) -> None:
        self.mean = tf.Variable(0.0, dtype=tf.float64, name="mean", trainable=False)
        self.seen = tf.Variable(0.0, dtype=tf.float64, name="seen", trainable=False)
        self.features = tf.Variable(np.zeros(4), name="features", trainable=False)
        self.steps = tf.Variable(0, dtype=tf.int64, name="steps", trainable=False)


def every_third_step(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    if state.steps % 3 == 0:
        state.mean.assign(0.9 * state.mean + 0.1 * loss)


def two_branches(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    if state.steps % 2 == 0:
        state.features.assign(0.9 * state.features + 0.1 * tf.reduce_mean(x, 0))
        state.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float64))
    else:
        state.mean.assign(tf.reduce_sum(x))
        state.mean.assign_add(loss)


def one_within_the_other(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    if state.steps % 2 == 0:
        if state.steps % 4 == 0:
            state.mean.assign(loss)
        else:
            state.seen.assign_add(loss)
        state.seen.assign_add(2.0)


def by_the_loss(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    """Replicas have losses of their own; one device has that of the whole batch."""
    if loss > state.mean:
        state.mean.assign(loss)
        state.seen.assign_add(tf.reduce_sum(x))


def losses_that_are_no_numbers(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    if not tf.math.is_finite(loss):
        state.seen.assign_add(1.0)


def by_what_the_step_wrote(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    state.mean.assign(0.5 * state.mean + 0.5 * loss)
    if state.mean > 0.3:
        state.seen.assign_add(state.mean)


def own_loss(state: State, x: tf.Tensor) -> tf.Tensor:
    """A loss of Keras is the quotient of a sum and a count; the mean over classes lists its axes in a tensor."""
    logits = tf.stack([x @ state.features[:, None], x @ tf.square(state.features)[:, None]], 1)[..., 0]
    return keras.losses.BinaryCrossentropy(from_logits=True)(tf.ones_like(logits), logits)


def follow(state: State, gradient: tf.Tensor) -> None:
    state.mean.assign(0.9 * state.mean + 0.1 * tf.reduce_sum(tf.square(gradient)))
    state.features.assign_sub(0.1 * gradient / (tf.sqrt(state.mean) + 0.01))


def by_a_gradient_in_the_branch(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    if state.steps % 2 == 0:
        with tf.GradientTape() as tape:
            tape.watch(state.features)
            own = own_loss(state, x)
        follow(state, tape.gradient(own, state.features))


def by_a_gradient_of_an_outer_tape(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        tape.watch(state.features)
        own = own_loss(state, x)
    if state.steps % 2 == 0:
        follow(state, tape.gradient(own, state.features))


def with_state(update: Callable[[State, tf.Tensor, tf.Tensor], object]) -> Callable[[tf.Tensor], tf.Tensor]:
    state = State()
    weight = tf.Variable(np.random.default_rng(0).normal(size=(4, 2)), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ weight)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        state.steps.assign_add(1)
        returned = update(state, x, loss)
        # All variables are touched, so that they are compared.
        touched = state.mean + state.seen + state.features[0] + tf.cast(state.steps, tf.float64)
        return loss if returned is None else returned, touched * 0.0

    return step


UPDATES = [
    every_third_step, two_branches, one_within_the_other, by_the_loss, losses_that_are_no_numbers,
    by_what_the_step_wrote, by_a_gradient_in_the_branch, by_a_gradient_of_an_outer_tape,
]  # fmt: skip


@pytest.mark.feature("function", "step: state under a condition")
@pytest.mark.parametrize("update, cluster", pairs(UPDATES, [(1, 2), (2, 1), (2, 2)]))
def test_state_under_a_condition_is_what_one_device_leaves(update, cluster):
    rng = np.random.default_rng(2)
    batches = [[rng.normal(size=(count, 4))] for count in (7, 8, 5, 6, 7, 8, 9, 7, 3, 6)]
    if update is losses_that_are_no_numbers:
        batches[6][0][0] = np.nan
    step = with_state(update)
    captured = capture(step, batches[0][0])
    assert captured.step.graph_index.of_op("If")
    expected = one_device(captured, tf.function(step, reduce_retracing=True), batches)
    assert_same(train(captured, plan(captured.step, *cluster), batches), expected, rtol=1e-9)


def test_a_value_that_a_condition_returns_is_chosen_too():
    def update(state, x, loss):
        returned = loss * 1.0
        if state.steps % 2 == 0:
            state.mean.assign(loss)
            returned = loss * 3.0
        return returned

    step, batches = with_state(update), [[np.random.default_rng(k).normal(size=(6, 4))] for k in range(4)]
    captured = capture(step, batches[0][0])
    expected = one_device(captured, tf.function(step), batches)
    assert_same(train(captured, plan(captured.step, 2, 2), batches), expected, rtol=1e-9)


def by_an_example(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    if x[0, 0] > 0:
        state.mean.assign(loss)


def by_a_likeness(state: State, x: tf.Tensor, loss: tf.Tensor) -> None:
    if tf.reduce_mean(tf.matmul(x, x, transpose_b=True)) > 1:
        state.seen.assign_add(1.0)


@pytest.mark.feature("function", "step: state under a condition on one example", refused="RewriteError")
@pytest.mark.parametrize("update, name", [(by_an_example, "mean"), (by_a_likeness, "seen")])
def test_a_condition_on_which_replicas_may_not_agree_is_refused(update, name):
    captured = capture(with_state(update), np.ones((4, 4)))
    with pytest.raises(RewriteError, match=rf"{name} is written under a condition .* may disagree .*tf\.where") as told:
        rewrite(captured.step, Context(plan(captured.step, 2, 1), 0))
    assert "aggregation" in str(told.value)


def test_state_beside_a_print_is_refused():
    def update(state, x, loss):
        if state.steps % 2 == 0:
            tf.print("kept")
            state.mean.assign(loss)

    captured = capture(with_state(update), np.ones((4, 4)))
    with pytest.raises(RewriteError, match=r"mean is written .* since one contains .*PrintV2.*. Move it out"):
        rewrite(captured.step, Context(plan(captured.step, 1, 2), 0))


def test_state_that_all_replicas_write_alike_stays_under_its_condition():
    def update(state, x, loss):
        if state.steps % 2 == 0:
            tf.print("kept", output_stream="file:///dev/null")
            state.seen.assign_add(1.0)

    captured = capture(with_state(update), np.ones((4, 4)))
    context = Context(plan(captured.step, 2, 2), 0)
    assert InlineBranches().apply(captured.step, context) is captured.step


def build_graph() -> None:
    """A session's graph: the update of an average reads the conditional's output without a control dependency."""
    x, trains = v1.placeholder(tf.float64, [None, 4], "x"), v1.placeholder_with_default(True, [], "trains")
    kernel = v1.get_variable("kernel", initializer=np.linspace(-1.0, 1.0, 12).reshape(4, 3), use_resource=True)
    average = v1.get_variable("average", initializer=np.zeros(3), use_resource=True, trainable=False)
    h = x @ kernel
    new = 0.1 * (tf.reduce_mean(h, 0) - average)
    updated = tf.cond(trains, lambda: tf.identity(average.assign_add(new)), lambda: tf.identity(average))
    loss = tf.reduce_mean(tf.square(tf.tanh(h) - 0.3))
    with tf.control_dependencies([updated]):
        tf.identity(average.read_value(), name="seen")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    tf.identity(kernel, name="weights")
    v1.global_variables_initializer()


@pytest.mark.parametrize("cuts", [{}, {"kernel": Partitioning(0, (1, 3))}])
def test_a_conditional_write_runs_even_if_no_node_waits_for_it(cuts):
    """Nodes that depended on the conditional by a value still follow its write."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        build_graph()
        cluster = Cluster(graph, notes.calls, lambda step: sharded_plan(step, cuts, 2) if cuts else plan(step, 2, 1))
        with v1.Session(graph=graph) as alone, cluster.session:
            alone.run("init")
            cluster.run(targets=["init"])
            for k in range(3):
                rows = np.random.default_rng(k).normal(size=(6, 4))
                expected = alone.run(["seen:0", "train"], {"x:0": rows})[0]
                for found in cluster.run(["seen:0"], ["train"], fetches_alike=True, x=rows):
                    np.testing.assert_allclose(found[0], expected, rtol=1e-12)
            for found in cluster.run(["weights:0"], fetches_alike=True):
                np.testing.assert_allclose(found[0], alone.run("weights:0"), rtol=1e-12)
