"""Layers whose parameters are gathered when they are needed train as one device does, one or two layers at a time."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.names import is_control, node_of
from autodist.kernels import Context, rewrite
from autodist.kernels.place.gather_layers import GATHER
from autodist.resources import ResourceSpec
from autodist.strategies import FSDP, Override, OverrideVariables, UseAllReduce, UseParameterServer, resolve_specs
from tests.unit.kernels.drawn_steps import Choices, on_one_device
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, rewritten, train
from tests.unit.kernels.in_one_session import workers_of

LAYERS = 9
WIDTH = 5


def machines(workers, replicas=1):
    nodes = [
        {"address": f"10.0.0.{k}", "cpus": list(range(replicas)), "chief": not k, "network_bandwidth": 10}
        for k in range(workers)
    ]
    return ResourceSpec.from_dict({"nodes": nodes})


def planned(captured, spec, builder=None, **options):
    builder = builder or FSDP(min_partition_bytes=1, **options)
    return resolve_specs(builder.build(captured.step, spec), captured.step, spec)


@functools.cache
def deep():
    """A chain of layers with residual connections, each of which casts its kernel; SGD."""
    rng = np.random.default_rng(3)
    kernels = [tf.Variable(rng.normal(size=(WIDTH, WIDTH)), name=f"layer_{k}/kernel") for k in range(LAYERS)]
    biases = [tf.Variable(rng.normal(size=WIDTH), name=f"layer_{k}/bias") for k in range(LAYERS)]

    def step(x):
        with tf.GradientTape() as tape:
            for kernel, bias in zip(kernels, biases, strict=True):
                x = x + tf.tanh(x @ tf.transpose(2.0 * kernel) + bias)
            loss = tf.reduce_mean(tf.square(x))
        for variable, gradient in zip([*kernels, *biases], tape.gradient(loss, [*kernels, *biases]), strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss

    batches = [(rng.normal(size=(n, WIDTH)),) for n in (7, 4, 1)]
    captured = capture(step, *batches[0])
    return captured, batches, one_device(captured, step, batches)


def gathers_of(step):
    """Returns the nodes of each gather of a step before replication, by number."""
    found = {}
    for node in step.graph_def.node:
        if GATHER in node.attr:
            found.setdefault(node.attr[GATHER].i, []).append(node)
    return found


def gathered(captured, prefetch):
    """The step after `gather-layers`."""
    strategy, seen = planned(captured, machines(2), prefetch=prefetch), {}
    rewrite(captured.step, Context(strategy, 0), also=seen.setdefault)
    return seen["gather-layers"]


def layers_before(step, names):
    """Returns the layers whose kernels nodes depend on."""
    editor = GraphEditor(step.graph_def)
    handles = {step.by_name[f"layer_{k}/kernel"].handle: k for k in range(LAYERS)}
    return {handles[name] for name in editor.ancestors(names) if name in handles}


# -- values ------------------------------------------------------------------------------------------------------------


# Adam and SGD are parts of others.
@pytest.mark.parametrize(
    "optimizer, layout",
    [
        ("momentum", (2, 1, 1)), ("adagrad", (4, 1, 0)), ("rmsprop", (2, 1, 1)), ("adamw", (3, 2, 1)),
        ("average", (2, 1, 1)), ("clipped", (4, 1, 0)), ("global norm", (3, 2, 1)),
    ],
)  # fmt: skip
def test_training_is_that_of_one_device(optimizer, layout):
    workers, replicas, prefetch = layout
    choices = Choices("mean", optimizer, is_tied=True, is_frozen=True, counts_steps=True)
    captured, batches, alone = on_one_device(choices, 7, (5, 2, 4))
    strategy = planned(captured, machines(workers, replicas), prefetch=prefetch)
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)


@pytest.mark.parametrize("layout", [(3, 2, 1), (4, 1, 0)])
def test_a_deep_model_trains_as_on_one_device(layout):
    workers, replicas, prefetch = layout
    captured, batches, alone = deep()
    strategy = planned(captured, machines(workers, replicas), prefetch=prefetch)
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)


def test_variables_may_have_other_synchronizers():
    captured, batches, alone = deep()
    overrides = (
        Override("layer_2/.*", UseAllReduce()),
        Override("layer_3/.*", UseParameterServer(local_proxy_variable=True)),
        Override("layer_4/kernel", UseParameterServer(owner=0)),
    )
    builder = OverrideVariables(FSDP(min_partition_bytes=1), overrides)
    assert_same(train(captured, planned(captured, machines(3), builder), batches), alone, rtol=1e-9)


def test_small_variables_have_one_owner():
    captured, batches, alone = deep()
    strategy = planned(captured, machines(3), FSDP(min_partition_bytes=100))
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_training_step_names_no_other_worker():
    captured, _, _ = deep()
    for worker, step in enumerate(rewritten(captured, planned(captured, machines(3)))):
        assert workers_of(step) == {worker}


def test_a_worker_sends_each_other_one_a_message_for_each_gather():
    captured, _, _ = deep()
    for step in rewritten(captured, planned(captured, machines(3))):
        sent = [n for n in step.graph_def.node if n.op == "QueueEnqueueV2" and n.name.startswith("autodist/gather/")]
        # The backward pass reads the last layer's parameters at once, and needs none of the first layer's.
        assert len(sent) == 2 * (LAYERS + LAYERS - 2)


# -- gates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_layer_is_read_after_the_output_of_the_one_before(prefetch):
    captured, _, _ = deep()
    step = gathered(captured, prefetch)
    for number in range(LAYERS):
        for read in gathers_of(step)[number]:
            gate = [node_of(i) for i in read.input if is_control(i)]
            assert layers_before(step, gate) == set(range(number - prefetch))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_layer_is_read_again_after_the_cotangent_has_left_the_one_after_it(prefetch):
    captured, _, _ = deep()
    step = gathered(captured, prefetch)
    editor = GraphEditor(step.graph_def)
    again = {number: reads for number, reads in gathers_of(step).items() if number >= LAYERS}
    assert len(again) == LAYERS - 2
    for number, reads in again.items():
        layer = 2 * LAYERS - 1 - number
        for read in reads:
            gate = [node_of(i) for i in read.input if is_control(i)]
            done = {earlier for earlier, nodes in again.items() if editor.ancestors(gate) & {n.name for n in nodes}}
            assert done == {earlier for earlier in again if earlier < number - prefetch}
            if layer + 1 + prefetch < LAYERS:  # its gradients are computed too
                kernel = f"layer_{layer + 1 + prefetch}/kernel"
                [gradient] = [g for g in step.gradients if g.variable == kernel]
                assert node_of(gradient.tensors[0]) in gate


@pytest.mark.parametrize("has_norm", [False, True])
def test_slots_are_read_when_the_gradient_of_their_variable_is_there(has_norm):
    """Else `momentum * m` of all layers would be computed at the start of the step."""
    rng = np.random.default_rng(3)
    kernels = [tf.Variable(rng.normal(size=(WIDTH, WIDTH)), name=f"layer_{k}/kernel") for k in range(3)]
    momenta = [tf.Variable(tf.zeros_like(kernel), name=f"momentum_{k}") for k, kernel in enumerate(kernels)]

    def step(x):
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = tf.tanh(x @ kernel)
            loss = tf.reduce_mean(tf.square(x))
        gradients = tape.gradient(loss, kernels)
        if has_norm:
            gradients = tf.clip_by_global_norm(gradients, 0.1)[0]
        for kernel, momentum, gradient in zip(kernels, momenta, gradients, strict=True):
            momentum.assign(0.9 * momentum - 0.05 * gradient)
            kernel.assign_add(momentum)
        return loss

    batch = rng.normal(size=(4, WIDTH))
    captured = capture(step, batch)
    expected = one_device(captured, step, [(batch,)] * 3)
    assert_same(train(captured, planned(captured, machines(2)), [(batch,)] * 3), expected)
    found = gathered(captured, 1)
    gradient_of = {g.variable: node_of(g.tensors[0]) for g in found.gradients}
    for k in range(3):
        handle = found.by_name[f"momentum_{k}"].handle
        [early] = [  # the other one reads what was written
            node for node in found.graph_def.node
            if node.op == "ReadVariableOp" and node.input[0] == handle
            and not any("Assign" in found.graph_index.nodes[node_of(i)].op for i in node.input[1:])
        ]  # fmt: skip
        assert gradient_of[f"layer_{k}/kernel"] in map(node_of, early.input[1:])


def test_weight_decay_gathers_no_parameters():
    """Its writes wait for the gathers, and so for the batch, but their values depend on parameters alone."""
    rng = np.random.default_rng(3)
    kernels = [tf.Variable(rng.normal(size=(WIDTH, WIDTH)), name=f"layer_{k}/kernel") for k in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = tf.tanh(x @ kernel)
            loss = tf.reduce_mean(tf.square(x))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(0.01 * kernel)
            kernel.assign_sub(0.05 * gradient)
        return loss

    batches = [(rng.normal(size=(4, WIDTH)),)] * 3
    captured = capture(step, *batches[0])
    strategy = planned(captured, machines(2))
    assert_same(train(captured, strategy, batches), one_device(captured, step, batches))
    made = rewrite(captured.step, Context(strategy, 0))
    assert not [node.name for node in made.graph_def.node if "remote_reads" in node.name]


def test_nothing_that_is_read_in_the_forward_pass_is_kept_for_the_backward_pass():
    captured, _, _ = deep()
    step = gathered(captured, 1)
    forward = {node.name for number in range(LAYERS - 1) for node in gathers_of(step)[number]}
    editor = GraphEditor(step.graph_def)
    backward = editor.ancestors([node_of(t) for g in step.gradients for t in g.tensors], control=False)
    loss = editor.ancestors([node_of(t) for call in step.gradient_calls for t in call.targets], control=False)
    for name in forward:
        derived = {name}.union(editor.consumers(name), *map(editor.consumers, editor.consumers(name)))
        assert derived & backward <= loss


def test_a_step_that_does_not_train_reads_its_layers_in_turn():
    training, batches, _ = deep()
    kernels = [source for source in training.sources if "kernel" in source.name]

    def evaluate(x):
        for kernel in kernels:
            x = tf.tanh(x @ kernel)
        return tf.reduce_sum(x)

    evaluation = capture(evaluate, *batches[0])
    strategy = planned(training, machines(3))
    for worker, step in enumerate(rewritten(evaluation, strategy)):
        reads = [node for node in step.graph_def.node if node.op == "ReadVariableOp"]
        assert len(reads) == LAYERS
        assert sum(any(map(is_control, read.input)) for read in reads) == LAYERS - 2
        sent = [n for n in step.graph_def.node if n.op == "QueueEnqueueV2" and n.name.startswith("autodist/gather/")]
        assert len(sent) == 2 * LAYERS
        assert workers_of(step) == {worker}
    found = train(evaluation, strategy, batches)
    for outputs, batch in zip(found.outputs, batches, strict=True):
        for output in outputs:
            np.testing.assert_allclose(output[0], evaluate(*batch), rtol=1e-9)


def test_a_layer_whose_elements_are_gathered_is_gathered_whole():
    """As the transitions of a conditional random field are."""
    w = tf.Variable(np.random.default_rng(0).normal(size=(4, 4)), name="w")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x[:, 0] * tf.gather_nd(w, tf.cast(tf.abs(x), tf.int32) % 4))
        w.assign_sub(tape.gradient(loss, w))
        return loss

    batches = [(np.random.default_rng(n).normal(size=(n, 2)) * 3,) for n in (5, 2, 1)]
    captured = capture(step, *batches[0])
    assert_same(train(captured, planned(captured, machines(3)), batches), one_device(captured, step, batches))


def test_a_step_that_differentiates_twice_gathers_without_gates():
    rng = np.random.default_rng(1)
    first, second = (tf.Variable(rng.normal(size=(4, 4)), name=name) for name in ("first", "second"))

    def step(x):
        for trained, other in ((first, second), (second, first)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.tanh(x @ trained) @ other))
            trained.assign_sub(0.1 * tape.gradient(loss, trained))
        return loss

    batches = [(rng.normal(size=(n, 4)),) for n in (5, 2)]
    captured = capture(step, *batches[0])
    alone = one_device(captured, step, batches)
    assert_same(train(captured, planned(captured, machines(3)), batches), alone, rtol=1e-9)


# -- models ------------------------------------------------------------------------------------------------------------

WORDS, LENGTH = 11, 6


class Block(keras.layers.Layer):
    """A block of a transformer."""

    def __init__(self, name):
        super().__init__(name=name, dtype="float64")
        self.attention = keras.layers.MultiHeadAttention(2, 3, dtype="float64")
        self.norm = keras.layers.LayerNormalization(dtype="float64")
        self.up = keras.layers.Dense(10, activation="gelu", dtype="float64")
        self.down = keras.layers.Dense(6, dtype="float64")

    def call(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(x))


def transformer():
    """Blocks between an embedding and a head that is tied to it."""
    ids = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.Embedding(WORDS, 6, name="words", dtype="float64")
    x = table(ids)
    for k in range(2):
        x = Block(f"block_{k}")(x)
    return keras.Model(ids, keras.ops.matmul(x, keras.ops.transpose(table.embeddings)))


def recurrent():
    layers = [keras.layers.Embedding(WORDS, 5), keras.layers.LSTM(7, return_sequences=True), keras.layers.Dense(WORDS)]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])


@pytest.mark.slow
@pytest.mark.parametrize(("build", "workers"), [(transformer, 2), (recurrent, 3)])
def test_a_keras_model_trains_as_on_one_device(build, workers):
    captured, batches, alone = trained_alone(build)
    assert_same(train(captured, planned(captured, machines(workers)), batches), alone, rtol=1e-9)


def trained_alone(build):
    keras.utils.set_random_seed(4)
    with keras_dtype("float64"):
        model, optimizer = build(), keras.optimizers.Adam(0.01, clipnorm=0.5)
        optimizer.build(model.trainable_variables)

    def step(ids, targets):
        with tf.GradientTape() as tape:
            logits = model(ids, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    rng = np.random.default_rng(5)
    sizes = (7, 4, 3)
    batches = [tuple(rng.integers(0, WORDS, (n, LENGTH)).astype(np.int32) for _ in range(2)) for n in sizes]
    captured = capture(step, *batches[0])
    return captured, batches, one_device(captured, step, batches)


@contextlib.contextmanager
def keras_dtype(dtype):
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)
