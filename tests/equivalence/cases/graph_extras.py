"""Graph mode beyond the matrix: feeds, fetches, decays and alternating steps of TensorFlow 1 scripts."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Alone, Results, Trainer, own, program
from tests.equivalence.cases.graph_models import GraphModel, Weights, build
from tests.equivalence.cases.models import make_batches

v1 = tf.compat.v1


def _variables(session: Any) -> Results:
    return dict(session.run({v.op.name: v for v in v1.global_variables()}))


def _run(
    ad: Trainer, session: Any, net: GraphModel, fetches: Any, feeds: Any = None, size: int = 30, kind: str = "mlp"
) -> list[Any]:
    """Returns the fetched values of each step, for this worker's part of the first `size` examples of each batch."""
    batches = make_batches(kind)
    return [
        session.run(fetches, {net.x: own(ad, x[:size]), net.y: own(ad, y[:size])} | (feeds or {}))
        for x, y in zip(batches.x, batches.y, strict=True)
    ]


@program
def graph_few_examples(ad: Trainer) -> Results:
    """Three examples for four replicas, and one, for which one worker feeds none; with a time limit, and traced."""
    batches = make_batches("embedding")
    with tf.Graph().as_default(), ad.scope():
        net = build("embedding")
        train = v1.train.AdagradOptimizer(0.05).minimize(net.loss)
        limited = v1.RunOptions(timeout_in_ms=60_000)
        traced = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer(), options=limited)
            for k, (x, y) in enumerate(zip(batches.x, batches.y, strict=True)):
                size, options, metadata = (3, 1)[k % 2], (None, limited, traced)[k % 3], v1.RunMetadata()
                session.run(train, {net.x: own(ad, x[:size]), net.y: own(ad, y[:size])}, options, metadata)
                assert bool(metadata.step_stats.dev_stats) == (options is traced)
            return _variables(session)


@program
def graph_decay_and_averages(ad: Trainer) -> Results:
    """A learning rate that falls with the steps, one that is fed, and averages of the weights."""
    with tf.Graph().as_default(), ad.scope():
        net = build("mlp")
        step = v1.train.get_or_create_global_step()
        factor = v1.placeholder(tf.float64, [], "factor")
        rate = v1.train.exponential_decay(tf.constant(0.05, tf.float64), step, 3, 0.8, staircase=True) * factor
        train = v1.train.AdamOptimizer(rate).minimize(net.loss, global_step=step)
        averages = tf.train.ExponentialMovingAverage(0.8)
        with tf.control_dependencies([train]):
            train = averages.apply(v1.trainable_variables())
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            _run(ad, session, net, train, {factor: 0.5})
            return _variables(session)


@program
def graph_fixed_lengths(ad: Trainer) -> Results:
    """In the style of char-rnn: a fixed number of examples divides sums, and the state is fed back."""
    size, draws = 12 // ad.num_workers, np.random.default_rng(8)
    with tf.Graph().as_default(), ad.scope():
        words, classes = (v1.placeholder(tf.int32, [size, 3], name) for name in ("words", "classes"))
        before = tf.zeros([size, 3], tf.float64)
        table, kernel = Weights().draw("table", 7, 3), Weights().draw("kernel", 3, 3)
        state, losses = before, []
        for k in range(3):
            state = tf.tanh(state @ kernel + tf.nn.embedding_lookup(table, words[:, k]))
            losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes[:, k], logits=state))
        cost = tf.reduce_sum(tf.add_n(losses)) / size / 3
        optimizer = v1.train.AdamOptimizer(0.01)
        found, variables = zip(*optimizer.compute_gradients(cost), strict=True)
        train = optimizer.apply_gradients(zip(tf.clip_by_global_norm(found, 0.2)[0], variables, strict=True))
        kept = np.zeros((size, 3))
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(10):
                given = own(ad, draws.integers(0, 7, (12, 3))), own(ad, draws.integers(0, 3, (12, 3)))
                kept, loss, _ = session.run([state, cost, train], {words: given[0], classes: given[1], before: kept})
            return _variables(session) | {"worker:loss": np.array(loss), "worker:examples": np.array(size)}


@program
def graph_alternating_optimizers(ad: Trainer) -> Results:
    """Each of two train operations has variables of its own, and a run of its own."""
    with tf.Graph().as_default(), ad.scope():
        net = build("mlp")
        hidden = [v for v in v1.trainable_variables() if "hidden" in v.name]
        last = [v for v in v1.trainable_variables() if "logits" in v.name]
        first = v1.train.AdamOptimizer(0.01).minimize(net.loss, var_list=hidden)
        second = v1.train.GradientDescentOptimizer(0.1).minimize(-net.loss, var_list=last)
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                _run(ad, session, net, first)
                _run(ad, session, net, second)
            return _variables(session)


@program
def graph_terms_of_several_weights(ad: Trainer) -> Results:
    """A scaled mean, a sum and a masked mean with an epsilon in its denominator, and two losses in one call of
    `gradients`.
    """
    with tf.Graph().as_default(), ad.scope():
        net = build("mlp")
        mask = tf.cast(net.x[:, 0] > 0.2, tf.float64)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=net.y, logits=net.logits)
        masked = tf.reduce_sum(each * mask) / (tf.reduce_sum(mask) + 1e-9)
        loss = 0.3 * (net.loss + 0.01 * tf.reduce_sum(tf.square(net.logits))) - (-masked) / 2
        optimizer = v1.train.MomentumOptimizer(0.05, 0.9)
        variables = v1.trainable_variables()
        given = [tf.constant(1.0, tf.float64), tf.reduce_mean(mask)]
        found = tf.gradients([loss, tf.nn.l2_loss(variables[0])], variables, given)
        train = optimizer.apply_gradients(zip(found, variables, strict=True))
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            _run(ad, session, net, train)
            return _variables(session)


@program
def graph_loop(ad: Trainer) -> Results:
    """A recurrence in a loop, by variables that the loop reads at every turn."""
    with tf.Graph().as_default(), ad.scope():
        net = build("mlp")
        kernel = Weights().draw("loop/kernel", 3, 3)

        def turn(k: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return k + 1, tf.tanh(state @ kernel + net.x[:, :3])

        _, state = tf.while_loop(lambda k, _: k < 4, turn, (0, net.logits))
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=net.y, logits=state))
        train = v1.train.AdagradOptimizer(0.05).minimize(loss)
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            _run(ad, session, net, train)
            return _variables(session)


@program
def graph_saved_and_loaded(ad: Trainer) -> Results:
    """TensorFlow's own Saver writes the trained values, and a later step resumes from them.

    Then values come from Python: by `load`, and by placeholders of fixed and of open shape.
    """
    with tf.Graph().as_default(), ad.scope(), tempfile.TemporaryDirectory() as folder:
        net = build("mlp")
        train = v1.train.AdamOptimizer(0.01).minimize(net.loss)
        kernel, bias, last = v1.trainable_variables()[:3]
        fixed, open_ = v1.placeholder(tf.float64, bias.shape), v1.placeholder(tf.float64, [None, last.shape[1]])
        assign = tf.group(bias.assign(fixed), last.assign(open_))
        saver = v1.train.Saver()
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            _run(ad, session, net, train)
            path = saver.save(session, f"{folder}/model")
            saved = _variables(session)
            _run(ad, session, net, train)
            saver.restore(session, path)
            restored = _variables(session)
            _run(ad, session, net, train)
            kernel.load(np.linspace(-1, 1, kernel.shape.num_elements()).reshape(kernel.shape), session)
            values = [np.linspace(0, 1, v.shape.num_elements()).reshape(v.shape) for v in (bias, last)]
            session.run(assign, {fixed: values[0], open_: values[1]})
            loaded = _variables(session)
            _run(ad, session, net, train)
            trained = _variables(session)
    return trained | _named("saved", saved) | _named("restored", restored) | _named("loaded", loaded)


def _named(prefix: str, values: Results) -> Results:
    return {f"{prefix} {name}": value for name, value in values.items()}


@program
def graph_fetches(ad: Trainer) -> Results:
    """Rows of a worker's own examples come in their order, sums and means are those of its own examples."""
    with tf.Graph().as_default(), ad.scope():
        net = build("mlp")
        right = tf.cast(tf.equal(tf.argmax(net.logits, axis=1, output_type=tf.int32), net.y), tf.float64)
        train = v1.train.MomentumOptimizer(0.05, 0.9).minimize(net.loss)
        fetches = {"rows": net.logits, "classes": tf.argmax(net.logits, 1), "right": tf.reduce_sum(right)}
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            _run(ad, session, net, train)
            fetched = _run(ad, session, net, fetches)[0] | {"loss": _run(ad, session, net, net.loss)[0]}
            return _variables(session) | {f"worker:{name}": np.asarray(value) for name, value in fetched.items()}


@program
def graph_without_initialiser(ad: Trainer) -> Results:
    """A script whose session initialises the variables, and that fetches a variable with the train operation."""
    with tf.Graph().as_default(), ad.scope():
        net = build("mlp")
        train = v1.train.AdamOptimizer(0.01).minimize(net.loss)
        before = v1.trainable_variables()[1]
        with ad.create_distributed_session() as session:
            if isinstance(ad, Alone):
                session.run(v1.global_variables_initializer())
            fetched = [value for _, value in _run(ad, session, net, (train, before))]
            return _variables(session) | {f"before step {k}": value for k, value in enumerate(fetched)}


@program
def graph_global_norm(ad: Trainer) -> Results:
    """The norm of all gradients, which clips them, fetched with the train operation in every other step."""
    with tf.Graph().as_default(), ad.scope():
        net = build("mlp")
        optimizer = v1.train.MomentumOptimizer(0.05, 0.9)
        gradients, variables = zip(*optimizer.compute_gradients(net.loss), strict=True)
        clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
        train = optimizer.apply_gradients(zip(clipped, variables, strict=True))
        norms = {}
        batches = make_batches("mlp")
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for k, (x, y) in enumerate(zip(batches.x, batches.y, strict=True)):
                fed = {net.x: own(ad, x), net.y: own(ad, y)}
                if k % 2:
                    session.run(train, fed)
                else:
                    norms[f"norm {k}"] = session.run((train, norm), fed)[1]
            return _variables(session) | norms


class _Stepping:
    """A model whose training step is a method, which returns the values to read."""

    def __init__(self) -> None:
        draws = np.random.default_rng(5)
        self.table = tf.Variable(draws.normal(size=(7, 3)), name="table")
        self.kernel = tf.Variable(draws.normal(size=(3, 1)), name="kernel")
        self.optimizer = keras.optimizers.Adam(0.01)

    def train(self, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, Any, tf.Variable]:
        ids, targets = batch
        hidden = tf.reduce_mean(tf.nn.embedding_lookup(self.table, ids), 1) @ self.kernel
        loss = tf.reduce_mean(tf.square(hidden[:, 0] - targets))
        gradients = tf.gradients(loss, [self.table, self.kernel])
        self.optimizer.apply_gradients(zip(gradients, [self.table, self.kernel], strict=True))
        return loss, self.optimizer.iterations, self.kernel

    def read(self) -> dict[str, tf.Tensor]:
        return {"table": tf.identity(self.table), "kernel": tf.identity(self.kernel)}


@program
def graph_called_step(ad: Trainer) -> Results:
    """A step that is called while its graph is built; alone it runs eagerly."""
    draws = np.random.default_rng(6)
    with nullcontext() if isinstance(ad, Alone) else tf.Graph().as_default(), ad.scope():
        model = _Stepping()
        step, read = ad.function(model.train), ad.function(model.read)
        for _ in range(4):
            ids, targets = draws.integers(0, 7, (30, 2)), draws.normal(size=30)
            step((own(ad, ids), own(ad, targets)))
        return {name: np.asarray(value) for name, value in read().items()}


@program
def graph_tf_keras(ad: Trainer) -> Results:
    """Layers and an optimizer of tf_keras, Keras 2, in a graph."""
    import tf_keras

    with tf.Graph().as_default(), ad.scope():
        v1.set_random_seed(3)
        x = v1.placeholder(tf.float64, [None, 6, 6, 2], "x")
        y = v1.placeholder(tf.int32, [None], "y")
        layers = tf_keras.layers
        tf_keras.backend.set_floatx("float64")
        first, last = (tf_keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
        convolution = layers.Conv2D(4, 3, activation="tanh", kernel_initializer=first)
        stack = [convolution, layers.Flatten(), layers.Dense(3, kernel_initializer=last)]
        net = tf_keras.Sequential([layers.InputLayer((6, 6, 2)), *stack])
        logits = net(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        train = tf_keras.optimizers.legacy.Adam(0.01).get_updates(loss, net.trainable_variables)
        batches = make_batches("convolution")
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for images, classes in zip(batches.x, batches.y, strict=True):
                session.run(train, {x: own(ad, images), y: own(ad, classes)})
            return _variables(session)
