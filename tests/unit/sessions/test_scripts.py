"""Constructs of TensorFlow 1 scripts in a session of two replicas: values, state and fetches equal one device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.src.legacy_tf_layers import normalization

from autodist import AutoDist, ResourceSpec
from autodist.errors import RewriteError
from tests.equivalence.cases.base import Alone

v1 = tf.compat.v1

BATCHES = 4
_HALF = np.random.default_rng(0).normal(size=(BATCHES, 5, 8))
X = np.concatenate([_HALF, _HALF[:, ::-1]], 1)
"""Both replicas' parts have the same moments, so that batch normalisation gives the same result as for the whole."""
Y = np.random.default_rng(1).normal(size=(BATCHES, 10, 1))

Found = dict[str, Any]
Feeds = Mapping[Any, Any]


def autodist() -> AutoDist:
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))


def placeholders() -> tuple[tf.Tensor, tf.Tensor]:
    return v1.placeholder(tf.float64, [None, 8], "x"), v1.placeholder(tf.float64, [None, 1], "y")


def network(x: tf.Tensor, name: str = "net", seed: int = 0, outputs: int = 1) -> tf.Tensor:
    rng = np.random.default_rng(seed)
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", initializer=rng.normal(0, 0.3, (x.shape[1], 6)))
        bias = v1.get_variable("bias", initializer=np.zeros(6))
        last = v1.get_variable("last", initializer=rng.normal(0, 0.3, (6, outputs)))
    return tf.tanh(x @ kernel + bias) @ last


def of(network: str) -> list[tf.Variable]:
    return v1.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES, f"{network}/")


def squared_error(prediction: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(prediction - y))


def values(session: Any) -> Found:
    return dict(session.run({v.op.name: v for v in v1.global_variables()}))


def assert_like_one_device(script: Callable[[Any], Found], rtol: float = 1e-12) -> None:
    expected, found = script(Alone()), script(autodist())
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        scale = np.abs(value).max(initial=0)
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=rtol * scale, err_msg=name)


@pytest.mark.feature("session", "fetches: merged summaries")
@pytest.mark.feature("session", "fetches: norms of gradients")
@pytest.mark.feature("session", "optimizer: gradients clipped by their norm")
def test_merged_summaries_of_a_loss_of_gradients_and_of_rows_are_fetched_beside_training():
    def script(ad):
        with tf.Graph().as_default(), ad.scope():
            x, y = placeholders()
            prediction = network(x)
            loss = squared_error(prediction, y)
            v1.summary.scalar("loss", loss)
            v1.summary.histogram("prediction", prediction)
            optimizer = v1.train.MomentumOptimizer(0.05, 0.9)
            found, variables = zip(*optimizer.compute_gradients(loss), strict=True)
            clipped, norm = tf.clip_by_global_norm(found, 0.1)
            v1.summary.scalar("norm", norm)
            for gradient, variable in zip(found, variables, strict=True):
                v1.summary.histogram(f"{variable.op.name}/gradient", gradient)
            train = optimizer.apply_gradients(zip(clipped, variables, strict=True))
            fetched = [train, loss, norm, v1.summary.merge_all()]
            with ad.create_distributed_session() as session:
                session.run(v1.global_variables_initializer())
                shown: Found = {}
                for k in range(BATCHES):
                    _, *numbers, text = session.run(fetched, {x: X[k], y: Y[k]})
                    shown |= {f"step {k}": np.array(numbers)} | summarised(text, f"step {k}")
                return shown | values(session)

    def summarised(text: bytes, prefix: str) -> Found:
        found = {}
        for value in v1.Summary.FromString(text).value:
            histogram = value.histo
            numbers = [histogram.min, histogram.max, histogram.num, histogram.sum, histogram.sum_squares]
            # How many values are in a bucket hangs on the last bit of a value that stands at its edge.
            found[f"{prefix} {value.tag}"] = np.array([np.float64(np.float32(value.simple_value)), *numbers])
        return found

    assert_like_one_device(script, rtol=1e-6)  # a summary holds a number in float32


def trained_with(layer: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], shape: Any = None) -> Callable[[Any], Found]:
    """A script that feeds whether it trains, and that evaluates in the end."""

    def script(ad):
        with tf.Graph().as_default(), ad.scope():
            x, y = placeholders()
            training = v1.placeholder(tf.bool, shape, "training")
            hidden = layer(x @ v1.get_variable("kernel", initializer=np.linspace(-1, 1, 32).reshape(8, 4)), training)
            loss = squared_error(tf.reduce_sum(hidden, 1, keepdims=True), y)
            with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
                train = v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss)
            with ad.create_distributed_session() as session:
                session.run(v1.global_variables_initializer())
                for k in range(BATCHES):
                    session.run(train, {x: X[k], y: Y[k], training: k != 2})
                evaluated = session.run({"loss": loss, "hidden": hidden}, {x: X[0], y: Y[0], training: False})
                return values(session) | evaluated

    return script


def layer_of_keras_2(hidden: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
    """Returns the equivalent of tf.compat.v1.layers.batch_normalization."""
    return normalization.batch_normalization(hidden, training=training)


def averages_in_a_branch(hidden: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
    """As it was written by hand: the branch that is taken in training keeps the averages."""
    mean, variance = tf.nn.moments(hidden, [0])
    averages = tf.train.ExponentialMovingAverage(0.5)

    def update() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([averages.apply([mean, variance])]):
            return tf.identity(mean), tf.identity(variance)

    moments = tf.cond(training, update, lambda: (averages.average(mean), averages.average(variance)))
    return tf.nn.batch_normalization(hidden, *moments, None, None, 1e-3)


def rows_of_a_branch(hidden: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
    """The branch returns a row for each example, with an unknown number of examples."""
    average = v1.get_variable("average", initializer=np.zeros(4), trainable=False)

    def update() -> tf.Tensor:
        mean = tf.reduce_mean(hidden, 0)
        with tf.control_dependencies([average.assign(0.9 * average + 0.1 * mean)]):
            return tf.tanh(hidden - mean)

    return tf.cond(training, update, lambda: tf.tanh(hidden - average))


@pytest.mark.feature("session", "model: batch normalisation, told by a placeholder")
@pytest.mark.filterwarnings("ignore:`tf.layers.batch_normalization` is deprecated")
@pytest.mark.parametrize("shape", [None, []])
def test_batch_normalisation_is_told_by_a_placeholder_whether_it_trains(shape):
    assert_like_one_device(trained_with(layer_of_keras_2, shape))


@pytest.mark.feature("session", "step: state under a condition")
@pytest.mark.parametrize("layer", [averages_in_a_branch, rows_of_a_branch])
def test_a_branch_keeps_averages_and_gives_what_is_computed_with(layer):
    assert_like_one_device(trained_with(layer, []))


def of_another_network(ad):
    """A3C: gradients by the weights of one network move those of another, which the first then takes over."""
    with tf.Graph().as_default(), ad.scope():
        x, y = placeholders()
        network(x, "shared", 0)
        loss = squared_error(network(x, "local", 1), y)
        clipped, norm = tf.clip_by_global_norm(tf.gradients(loss, of("local")), 0.5)
        train = v1.train.RMSPropOptimizer(0.05).apply_gradients(zip(clipped, of("shared"), strict=True))
        take = [mine.assign(theirs) for mine, theirs in zip(of("local"), of("shared"), strict=True)]
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            norms = []
            for k in range(BATCHES):
                session.run(take)
                norms += session.run([train, norm, loss], {x: X[k], y: Y[k]})[1:]
            return values(session) | {"norms": np.array(norms)}


def fed_back(ad):
    """Policy gradients: a run returns gradients, which the script adds up and feeds to another that applies them."""
    with tf.Graph().as_default(), ad.scope():
        x, y = placeholders()
        found = tf.gradients(squared_error(network(x), y), of("net"))
        fed = [v1.placeholder(tf.float64, shape) for shape in ([8, 6], [None], None)]
        train = v1.train.AdamOptimizer(0.05).apply_gradients(zip(fed, of("net"), strict=True))
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for k in range(0, BATCHES, 2):
                first, second = (session.run(found, {x: X[n], y: Y[n]}) for n in (k, k + 1))
                session.run(train, {p: a + b for p, a, b in zip(fed, first, second, strict=True)})
            return values(session)


def of_actions(ad):
    """An actor whose gradients are weighted by fed values: a critic's gradients by the actor's actions."""
    with tf.Graph().as_default(), ad.scope():
        x, y = placeholders()
        acted, action = network(x, "actor", 0, 2), v1.placeholder(tf.float64, [None, 2], "action")
        value = network(tf.concat([x[:, :6], action], 1), "critic", 1)
        critic = v1.train.AdamOptimizer(0.05).minimize(squared_error(value, y), var_list=of("critic"))
        slope, weight = tf.gradients(value, action)[0], v1.placeholder(tf.float64, [None, 2], "weight")
        found = [g / tf.cast(tf.shape(x)[0], tf.float64) for g in tf.gradients(acted, of("actor"), -weight)]
        with tf.control_dependencies(found):  # without a loss one device may update `last` before it reads it
            actor = v1.train.AdamOptimizer(0.05).apply_gradients(zip(found, of("actor"), strict=True))
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for k in range(BATCHES):
                actions = session.run(acted, {x: X[k]})
                session.run(critic, {x: X[k], y: Y[k], action: actions})
                session.run(actor, {x: X[k], weight: session.run(slope, {x: X[k], action: actions})})
            return values(session)


def gathered(ad):
    """Gradients of a sum are added up by some runs, and applied and forgotten by others."""
    with tf.Graph().as_default(), ad.scope():
        x, y = placeholders()
        loss = tf.reduce_sum(tf.square(network(x) - y))
        kept = [tf.Variable(tf.zeros(v.shape, tf.float64), trainable=False) for v in of("net")]
        gather = [k.assign_add(g) for k, g in zip(kept, tf.gradients(loss, of("net")), strict=True)]
        train = v1.train.AdamOptimizer(0.05).apply_gradients(zip(kept, of("net"), strict=True))
        forget = [k.assign(tf.zeros(k.shape, tf.float64)) for k in kept]
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for k in range(BATCHES):
                session.run(gather, {x: X[k], y: Y[k]})
                if k % 2:
                    session.run(train)
                    session.run(forget)
            return values(session)


def by_hand(ad):
    """Adam, written with assignments, with the trust ratio of LARS."""
    with tf.Graph().as_default(), ad.scope():
        x, y = placeholders()
        loss = squared_error(network(x), y)
        steps = v1.get_variable("steps", initializer=np.float64(0), trainable=False).assign_add(1.0)
        writes = []
        for variable, gradient in zip(of("net"), tf.gradients(loss, of("net")), strict=True):
            first, second = (tf.Variable(tf.zeros(variable.shape, tf.float64)) for _ in range(2))  # trainable, as such
            first = first.assign(0.9 * first + 0.1 * gradient)
            second = second.assign_add(0.01 * (tf.square(gradient) - second))
            step = first / (1 - 0.9**steps) / (tf.sqrt(second / (1 - 0.99**steps)) + 1e-8)
            ratio = tf.norm(variable) / (tf.norm(step) + 1e-6)
            writes.append(variable.assign_sub(0.01 * (1.0 + ratio) * step))
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            losses = [session.run([loss, writes], {x: X[k], y: Y[k]})[0] for k in range(BATCHES)]
            return values(session) | {"losses": np.array(losses)}


def by_keras_2(ad):
    """tf_keras's Adam, called in a function, as its writes require."""
    with tf.Graph().as_default(), ad.scope():
        x, y = placeholders()
        loss = squared_error(network(x), y)
        optimizer = tf_keras.optimizers.Adam(0.05)
        optimizer.build(of("net"))
        apply = tf.function(lambda *found: optimizer.apply_gradients(zip(found, of("net"), strict=True)))
        train = apply(*tf.gradients(loss, of("net")))
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for k in range(BATCHES):
                session.run(train, {x: X[k], y: Y[k]})
            return values(session)


@pytest.mark.feature("session", "optimizer: gradients applied to another network (A3C)")
@pytest.mark.feature("session", "optimizer: gradients that are fed (policy gradients)")
@pytest.mark.feature("session", "optimizer: gradient accumulation")
@pytest.mark.feature("session", "optimizer: optimizers written by hand")
@pytest.mark.parametrize("script", [of_another_network, fed_back, of_actions, gathered, by_hand, by_keras_2])
def test_gradients_are_applied_as_scripts_like(script):
    assert_like_one_device(script)


@pytest.mark.feature("session", "model: towers, in scopes of any name")
def test_scopes_may_have_the_names_that_kernels_give():
    def script(ad):
        with tf.Graph().as_default(), ad.scope():
            x, y = placeholders()
            towers = [
                network(x, name, seed) for seed, name in enumerate(("tower", "replica_1/tower", "autodist/tower"))
            ]
            with tf.name_scope("replica_1/"):
                loss = squared_error(tf.add_n(towers, "tower/all"), y)
            train = v1.train.AdamOptimizer(0.05).minimize(loss)
            with ad.create_distributed_session() as session:
                session.run(v1.global_variables_initializer())
                losses = [session.run([train, loss], {x: X[k], y: Y[k]})[1] for k in range(BATCHES)]
                return values(session) | {"losses": np.array(losses)}

    assert_like_one_device(script)


@pytest.fixture
def version_1(first_control_flow):
    """Like `tf.compat.v1.disable_v2_behavior()`, except for its irreversible parts."""
    v1.disable_v2_tensorshape()
    yield
    v1.enable_v2_tensorshape()


def of_version_1():
    """Control flow that a script builds in its graph outside of the scope, with TensorFlow 2's control flow."""
    v1.disable_control_flow_v2()


def looping(build: Callable[[], None]) -> Callable[[Any], Found]:
    """A script whose loop reads a variable, stores its iterations' results in arrays, and reads rows of a table."""

    def script(ad):
        with tf.Graph().as_default(), ad.scope():
            build()
            x, y = placeholders()
            words = v1.placeholder(tf.int32, [None], "words")
            table = v1.get_variable("table", initializer=np.linspace(-1.0, 1.0, 11 * 8).reshape(11, 8))
            kernel = v1.get_variable("kernel", initializer=np.eye(8) * 0.5)
            turns = v1.scan(
                lambda h, a: tf.tanh(h @ kernel + a), tf.stack([x, 2 * x]), initializer=x + tf.gather(table, words)
            )
            hidden = v1.while_loop(lambda k, h: k < 2, lambda k, h: (k + 1, tf.tanh(h @ kernel)), [0, turns[-1]])[1]
            loss = squared_error(tf.reduce_sum(hidden, 1, keepdims=True), y)
            optimizer = v1.train.AdamOptimizer(0.05)
            pairs = optimizer.compute_gradients(loss)
            clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.5)
            train = optimizer.apply_gradients(zip(clipped, [variable for _, variable in pairs], strict=True))
            with ad.create_distributed_session() as session:
                session.run(v1.global_variables_initializer())
                for k in range(BATCHES):
                    loss_of, _ = session.run([loss, train], {x: X[k], y: Y[k], words: np.arange(10) % 7})
                    assert type(x.shape[1]) is type(tf.TensorShape([8])[0])
                return values(session) | {"loss": loss_of}

    return script


@pytest.mark.feature("session", "step: tf.compat.v1.disable_v2_behavior()")
@pytest.mark.usefixtures("version_1")
@pytest.mark.parametrize("build", [lambda: None, of_version_1])
def test_a_script_that_disables_what_version_2_does_has_its_dimensions_and_trains_as_on_one_device(build):
    assert_like_one_device(looping(build))


@pytest.mark.usefixtures("version_1")
@pytest.mark.filterwarnings("ignore:`tf.layers.batch_normalization` is deprecated")
@pytest.mark.parametrize("layer", [layer_of_keras_2, averages_in_a_branch, rows_of_a_branch])
def test_branches_of_such_a_script_keep_averages(layer):
    assert_like_one_device(trained_with(layer, []))
    assert not v1.control_flow_v2_enabled()


@pytest.mark.usefixtures("version_1")
@pytest.mark.filterwarnings("ignore:`tf.layers.batch_normalization` is deprecated")
def test_averages_that_a_branch_of_version_1_reads_are_refused_where_their_write_would_not_run():
    def layer(hidden, training):
        of_version_1()
        return layer_of_keras_2(hidden, training)

    with pytest.raises(RewriteError, match="moving_mean .* in a branch of TensorFlow 1.*enable_control_flow_v2"):
        trained_with(layer, [])(autodist())


def test_counts_of_clusters_are_added_up():
    """k-means by assignments: a segment sum is added to a variable; the segments are clusters, not examples."""

    def script(ad):
        with tf.Graph().as_default(), ad.scope():
            x, y = placeholders()
            centres = v1.get_variable("centres", initializer=X[0, :3], trainable=False)
            count = v1.get_variable("count", initializer=np.zeros(3), trainable=False)
            train = v1.train.GradientDescentOptimizer(0.1).minimize(squared_error(network(x), y))
            nearest = tf.argmin(tf.reduce_sum(tf.square(x[:, None] - centres), 2), 1)
            sums = tf.math.unsorted_segment_sum(x, nearest, 3)
            sizes = tf.math.unsorted_segment_sum(tf.ones_like(x[:, 0]), nearest, 3)
            with tf.control_dependencies([sums, sizes]):
                moved = [centres.assign(sums / tf.maximum(sizes, 1.0)[:, None]), count.assign_add(sizes)]
            with ad.create_distributed_session() as session:
                session.run(v1.global_variables_initializer())
                for k in range(BATCHES):
                    session.run(moved, {x: X[k]})
                    session.run([train, moved], {x: X[k], y: Y[k]})
                return values(session)

    assert_like_one_device(script)


def test_placeholders_of_any_shape_are_what_is_fed():
    """`tf.placeholder(tf.float32)`, as scripts write it for rates, and for examples that come alone and together."""

    def script(ad):
        with tf.Graph().as_default(), ad.scope():
            x, y, kept = (v1.placeholder(tf.float64) for _ in range(3))
            weight, bias = (v1.get_variable(name, initializer=np.float64(0.3)) for name in ("weight", "bias"))
            prediction = v1.nn.dropout(x * weight + bias, kept)
            cost = tf.reduce_sum(tf.square(prediction - y)) / 10
            train = v1.train.GradientDescentOptimizer(0.1).minimize(cost)
            with ad.create_distributed_session() as session:
                session.run(v1.global_variables_initializer())
                found = []
                for rows in (X[0, :, 0], X[1, :9, 0]):
                    session.run(train, {x: rows[0], y: rows[1], kept: 1.0})
                    found.append(session.run([cost, train], {x: rows, y: -rows, kept: 1.0})[0])
                    found.append(session.run(cost, {x: rows, y: rows, kept: 1.0}))
                return values(session) | {"costs": np.array(found)}

    assert_like_one_device(script)
