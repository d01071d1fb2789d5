"""Steps that write a trained variable before they use it: weights that are clipped, masked, normalised."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.place.partition.shards import assert_trains_alike, every_cut, sharded_plan

Step = Callable[[tf.Tensor], object]


def batches(*sizes: int) -> list[tuple[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 3)),) for n in sizes]


def variable(name: str, *shape: int) -> tf.Variable:
    return tf.Variable(np.random.default_rng(len(name)).normal(size=shape), name=name)


def clipped() -> Step:
    w, v = variable("w", 3, 4), variable("other", 4, 2)

    def step(x: tf.Tensor) -> tf.Tensor:
        w.assign(tf.clip_by_value(w, -0.4, 0.4))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ w) @ v - 1.0) ** 2)
        by_w, by_v = tape.gradient(loss, [w, v])
        w.assign_sub(0.5 * by_w)
        v.assign_sub(0.5 * by_v)
        return loss

    return step


def masked_by_keras() -> Step:
    """As keras-io's PixelCNN masks the kernel of a convolution in its call; its optimizer is Adam."""
    layers = [keras.layers.Dense(4, dtype="float64"), keras.layers.Dense(2, dtype="float64")]
    layers[0].build([None, 3])
    layers[1].build([None, 4])
    mask = np.tril(np.ones([3, 4]))
    variables = [v for layer in layers for v in layer.trainable_variables]
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            layers[0].kernel.assign(layers[0].kernel * mask)
            loss = tf.reduce_mean((layers[1](tf.tanh(layers[0](x))) - 1.0) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step


def spectrally_normalised() -> Step:
    layers = [
        keras.layers.SpectralNormalization(keras.layers.Dense(n, dtype="float64"), dtype="float64") for n in (4, 2)
    ]
    layers[0].build([None, 3])
    layers[1].build([None, 4])
    variables = [v for layer in layers for v in layer.trainable_variables]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((layers[1](tf.tanh(layers[0](x, training=True)), training=True) - 1.0) ** 2)
        for v, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * gradient)
        return loss

    return step


def spectrally_normalised_twice() -> Step:
    """A discriminator is called for real and generated examples; the second call reads in a branch what it wrote.

    It is updated twice.
    """
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(2, dtype="float64"), dtype="float64")
    layer.build([None, 3])

    def step(x: tf.Tensor) -> tf.Tensor:
        for target in (1.0, 2.0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(x, training=True) - layer(tf.tanh(x), training=True) - target) ** 2)
            gradients = tape.gradient(loss, layer.trainable_variables)
            for v, gradient in zip(layer.trainable_variables, gradients, strict=True):
                v.assign_sub(0.1 * gradient)
        return loss

    return step


def clipped_at_times() -> Step:
    """Weights are clipped in every second step, in a branch."""
    w, count = variable("w", 3, 4), tf.Variable(0, name="count", trainable=False)

    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        tf.cond(count % 2 == 0, lambda: w.assign(tf.clip_by_value(w, -0.4, 0.4)), lambda: tf.identity(w))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss

    return step


def differentiated_in_a_branch() -> Step:
    """Weights are clipped, and a branch computes the loss with them."""
    w = variable("w", 3, 4)

    def step(x: tf.Tensor) -> tf.Tensor:
        w.assign(tf.clip_by_value(w, -0.4, 0.4))
        with tf.GradientTape() as tape:
            y = tf.cond(tf.reduce_all(w < 0.5), lambda: tf.tanh(x @ w), lambda: x @ w)
            loss = tf.reduce_mean((y - 1.0) ** 2)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss

    return step


def penalised_in_a_branch() -> Step:
    """Weights are clipped, and a branch penalises them."""
    w = variable("w", 3, 4)

    def step(x: tf.Tensor) -> tf.Tensor:
        w.assign(tf.clip_by_value(w, -0.4, 0.4))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
            loss += tf.cond(tf.reduce_all(w < 0.5), lambda: tf.reduce_sum(w**2), lambda: 0.0 * loss)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss

    return step


def used_in_a_loop() -> Step:
    """Recurrent weights are normalised, and a loop over time uses them."""
    w = variable("w", 3, 3)

    def step(x: tf.Tensor) -> tf.Tensor:
        w.assign(w / tf.norm(w))
        with tf.GradientTape() as tape:
            _, y = tf.while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, tf.tanh(y @ w)), (0, x))
            loss = tf.reduce_mean((y - 1.0) ** 2)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss

    return step


def updated_between() -> Step:
    """A critic's weights are clipped, and updated twice: the second loss reads them after the first update."""
    w = variable("w", 3, 4)

    def step(x: tf.Tensor) -> tf.Tensor:
        w.assign(tf.clip_by_value(w, -0.4, 0.4))
        for target in (1.0, 2.0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - target) ** 2)
            w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss

    return step


def normalised_between() -> Step:
    """A critic's weights are normalised before each of two updates."""
    w = variable("w", 3, 4)

    def step(x: tf.Tensor) -> tf.Tensor:
        for target in (1.0, 2.0):
            w.assign_add(0.1 * tf.sign(w))
            with tf.GradientTape() as tape:
                w.assign(w / tf.norm(w))
                loss = tf.reduce_mean((x @ w - target) ** 2)
            w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss

    return step


def from_an_old_value() -> Step:
    """The update is undone: what is added to the value from before it is no addition to the current one."""
    w = variable("w", 3, 4)

    def step(x: tf.Tensor) -> tf.Tensor:
        old = tf.convert_to_tensor(w)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        w.assign(old + tf.reduce_mean(x, 0)[:, None] * tf.ones_like(old))
        return loss + tf.reduce_sum(w)

    return step


def twice() -> Step:
    """Written twice before its use, once by an addition, and read by the optimizer's decay."""
    w = variable("w", 3, 2)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        before = tf.reduce_sum(w)
        w.assign_add(0.1 * tf.sign(w))
        w.assign(w / tf.norm(w))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
        w.assign_sub(0.5 * (tape.gradient(loss, w) + 0.1 * w))
        return loss, before, tf.reduce_sum(w)

    return step


def critic() -> Step:
    """WGAN: the critic's weights are clipped after its update, before the generator's loss reads them."""
    maker, judge = variable("maker", 3, 3), variable("judge", 3, 1)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            distance = tf.reduce_mean(tf.tanh(x @ maker) @ judge) - tf.reduce_mean(x @ judge)
        judge.assign_sub(0.5 * tape.gradient(distance, judge))
        judge.assign(tf.clip_by_value(judge, -0.3, 0.3))
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(tf.tanh(x @ maker) @ judge)
        maker.assign_sub(0.5 * tape.gradient(loss, maker))
        return distance, loss

    return step


def averaged() -> Step:
    """An average of weights is brought up to date before its use, as a momentum encoder's."""
    w, average = variable("w", 3, 2), tf.Variable(np.ones([3, 2]), name="average", trainable=False)

    def step(x: tf.Tensor) -> tf.Tensor:
        average.assign(0.9 * average + 0.1 * w)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - x @ average - 1.0) ** 2)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss

    return step


def looked_up() -> Step:
    """Rows of a table that is written before."""
    table = variable("table", 5, 3)

    def step(x: tf.Tensor) -> tf.Tensor:
        table.assign(tf.clip_by_norm(table, 1.0, axes=[1]))
        ids = tf.cast(tf.abs(x[:, 0]) * 2, tf.int32) % 5
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, ids) - x) ** 2)
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.5 * gradient.values, gradient.indices))
        return loss

    return step


@pytest.mark.feature("function", "model: weights clipped, masked or normalised before their use")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (clipped, (2, 1)),
        (clipped, (1, 2)),
        (clipped, (3, 2)),
        (masked_by_keras, (2, 2)),
        (spectrally_normalised, (2, 1)),
        (spectrally_normalised_twice, (2, 1)),
        (clipped_at_times, (2, 1)),
        (differentiated_in_a_branch, (2, 2)),
        (penalised_in_a_branch, (2, 1)),
        (used_in_a_loop, (2, 1)),
        (updated_between, (2, 1)),
        (from_an_old_value, (2, 1)),
        (from_an_old_value, (1, 2)),
        (normalised_between, (2, 2)),
        (twice, (2, 2)),
        (critic, (2, 1)),
        (averaged, (2, 1)),
        (looked_up, (2, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_owners_hold_what_one_device_leaves(make: Callable[[], Step], shape: tuple[int, int]) -> None:
    step, data = make(), batches(8, 7, 5)
    captured = capture(step, *data[0])
    names = dict.fromkeys(g.variable for g in captured.step.gradients)
    owners = {name: (k + 1) % shape[0] for k, name in enumerate(names)}
    found = train(captured, plan(captured.step, *shape, owners=owners), data)
    assert_same(found, one_device(captured, step, data), 1e-11)


@pytest.mark.parametrize("options", [{"local_proxy": True}, {"servers": 1}], ids=str)
@pytest.mark.parametrize("make", [clipped, normalised_between])
def test_proxies_and_owners_without_replicas(make: Callable[[], Step], options: dict[str, object]) -> None:
    step, data = make(), batches(8, 7)
    captured = capture(step, *data[0])
    names = {g.variable for g in captured.step.gradients}
    owners = {name: owner for name, owner in (("w", 2 if "servers" in options else 1), ("other", 0)) if name in names}
    found = train(captured, plan(captured.step, 2, owners=owners, **options), data)
    assert_same(found, one_device(captured, step, data))


@pytest.mark.parametrize(
    "make", [clipped, twice, looked_up, clipped_at_times, penalised_in_a_branch, normalised_between]
)
def test_shards_with_owners(make: Callable[[], Step]) -> None:
    step, data = make(), batches(8, 7)
    captured = capture(step, *data[0])
    assert_trains_alike(captured, step, sharded_plan(captured.step, every_cut(captured.step)), data, 1e-11)


@pytest.mark.feature(
    "function", "model: weights written before their use, under asynchronous servers", refused="StrategyError"
)
@pytest.mark.parametrize("options", [{"asynchronous": True}, {"staleness": 1}], ids=str)
def test_steps_that_wait_for_nobody_are_refused(options: dict[str, object]) -> None:
    captured = capture(clipped(), *batches(8)[0])
    strategy = plan(captured.step, 2, owners={"w": 1, "other": 0}, **options)
    with pytest.raises(StrategyError, match="w is written by the step before it is used.*AllReduce"):
        rewritten(captured, strategy)


def test_a_variable_that_only_the_update_reads_stays_at_its_owner() -> None:
    """A decay of weights that is written before the update: no other worker needs the value again."""
    w = variable("w", 3, 2)

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * w)
        w.assign_sub(0.5 * gradient)

    captured = capture(step, *batches(8)[0])
    item = rewritten(captured, plan(captured.step, 2, owners={"w": 1}))[0]
    assert not item.graph_index.of_op("ReadVariableOp")
    queues = [node.attr["shared_name"].s.decode() for node in item.graph_index.of_op("FIFOQueueV2")]
    assert len([name for name in queues if "values" in name]) == 1


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_branches_and_loops_read_what_each_replica_wrote(shape: tuple[int, int]) -> None:
    """State that differs between replicas and holds numbers for examples, without a gradient."""
    w, mean = variable("w", 3, 2), tf.Variable(np.zeros(3), name="mean", trainable=False)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, 0))
        in_branch = tf.cond(tf.size(x) > 0, lambda: tf.reduce_sum(mean * 2.0), lambda: tf.constant(0.0, tf.float64))
        _, in_loop = tf.while_loop(
            lambda k, y: k < 3, lambda k, y: (k + 1, y + tf.reduce_sum(mean)), (0, tf.constant(0.0, tf.float64))
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        return loss, in_branch, in_loop

    data = batches(8, 7)
    captured = capture(step, *data[0])
    found = train(captured, plan(captured.step, *shape), data)
    assert_same(found, one_device(captured, step, data), 1e-11)
