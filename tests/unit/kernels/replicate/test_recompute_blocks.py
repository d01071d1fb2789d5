"""Blocks recompute their activations in the backward pass: less memory, and the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.blocks import find_blocks
from autodist.graph.names import is_control, node_of
from autodist.graph.recomputation import copied_for
from autodist.graph.step import ReplicatedStep
from autodist.kernels import Context
from autodist.kernels.replicate.recompute_blocks import RecomputeBlocks
from tests.unit.kernels.in_one_process import Session, capture, plan
from tests.unit.kernels.pipelined.test_recompute import DRAWS, WRITES
from tests.unit.kernels.rewrites import assert_rewrites, cases, step_of

v1 = tf.compat.v1

ONE = {"block": ["block"]}


@cases(
    {
        "a value that only the block and its gradient read is computed again": """
          x = Placeholder()
          seed = Placeholder()
          block/f = Tanh(x)
          block/g = Exp(block/f)
          out = Neg(block/g)
          back/out = Neg(seed)
          back/g = Mul(block/g, back/out)
        - back/f = TanhGrad(block/f, back/g)
        + back/f = TanhGrad(block/f-recomputed, back/g)
        + x-0.0-recomputed = Identity(x, ^back/g)
        + block/f-recomputed = Tanh(x-0.0-recomputed)
          return out:0, back/f:0
        """,
        "copies read copies, and a cotangent within the block is no gate": """
          x = Placeholder()
          seed = Placeholder()
          block/f = Tanh(x)
          block/g = Sigmoid(block/f)
          block/h = Neg(block/g)
          back/out = Neg(seed)
          gradient_tape/block/h = Neg(back/out)
        - gradient_tape/block/g = SigmoidGrad(block/g, gradient_tape/block/h)
        + gradient_tape/block/g = SigmoidGrad(block/g-recomputed, gradient_tape/block/h)
        - gradient_tape/block/f = TanhGrad(block/f, gradient_tape/block/g)
        + gradient_tape/block/f = TanhGrad(block/f-recomputed, gradient_tape/block/g)
        + x-0.0-recomputed = Identity(x, ^back/out)
        + block/f-recomputed = Tanh(x-0.0-recomputed)
        + block/g-recomputed = Sigmoid(block/f-recomputed)
          return block/h:0, gradient_tape/block/f:0
        """,
        "a random draw that advances a state keeps its value, and constants stay": """
          x = Placeholder()
          seed = Placeholder()
          shape = [2]
          block/two = 2.0
          block/four = Square(block/two)
          block/draw = RandomUniform(shape, dtype=float32)
          block/f = Mul(x, block/draw)
          block/g = Mul(block/f, block/four)
          block/h = Tanh(block/g)
          out = Neg(block/h)
          back/out = Neg(seed)
          back/h = Mul(block/h, back/out)
        - back/g = Mul(block/g, back/h)
        + back/g = Mul(block/g-recomputed, back/h)
          back/f = Mul(block/draw, back/g)
        + x-0.0-recomputed = Identity(x, ^back/h)
        + block/draw-0.0-recomputed = Identity(block/draw, ^back/h)
        + block/f-recomputed = Mul(x-0.0-recomputed, block/draw-0.0-recomputed)
        + block/g-recomputed = Mul(block/f-recomputed, block/four)
          return out:0, back/f:0
        """,
        "a forward value that only the gradient needs belongs to its block": """
          x = Placeholder()
          seed = Placeholder()
          block/f = Tanh(x)
          block/g = Neg(block/f)
          gradient_tape/block/log = Log(block/f)
          back/g = Neg(seed)
        - back/f = Mul(gradient_tape/block/log, back/g)
        + back/f = Mul(gradient_tape/block/log-recomputed, back/g)
        + x-0.0-recomputed = Identity(x, ^back/g)
        + block/f-recomputed = Tanh(x-0.0-recomputed)
        + gradient_tape/block/log-recomputed = Log(block/f-recomputed)
          return block/g:0, back/f:0
        """,
    }
)
def test_rewrites(text):
    of_block = [f"{scope}/{k}" for scope in ("back", "gradient_tape/block") for k in ("out", "f", "g", "h")]
    assert_rewrites(RecomputeBlocks(), text, blocks=ONE, backward=(frozenset(["seed", *of_block]),))


def test_a_value_that_the_step_returns_stays():
    """The kernel changes no node."""
    text = """
      x = Placeholder()
      seed = Placeholder()
      block/f = Tanh(x)
      back/f = TanhGrad(block/f, seed)
      return block/f:0, back/f:0
    """
    before = step_of(text, ReplicatedStep, backward=(frozenset(["seed", "back/f"]),))
    strategy = plan(before)
    strategy.recomputed_blocks.add(name="block", scopes=["block"])
    assert RecomputeBlocks().apply(before, Context(strategy, 0)).graph_def == before.graph_def


class Attention(keras.layers.Layer):
    """A transformer's block: attention and two dense layers, with dropout by key."""

    def __init__(self, width, seed, **options):
        super().__init__(dtype="float64", **options)
        self.norms = [keras.layers.LayerNormalization(dtype="float64") for _ in range(2)]
        self.attention = keras.layers.MultiHeadAttention(2, width // 2, dtype="float64")
        self.up = keras.layers.Dense(2 * width, "gelu", dtype="float64")
        self.down = keras.layers.Dense(width, dtype="float64")
        self.dropout = keras.layers.Dropout(0.3, seed=seed, dtype="float64")

    def call(self, x, training=True):
        h = self.norms[0](x)
        x = x + self.dropout(self.attention(h, h, use_causal_mask=True), training=training)
        return x + self.down(self.up(self.norms[1](x)))


class Convolution(keras.layers.Layer):
    """A convolution with batch normalisation."""

    def __init__(self, **options):
        super().__init__(dtype="float64", **options)
        self.convolution = keras.layers.Conv2D(3, 3, padding="same", use_bias=False, dtype="float64")
        self.norm = keras.layers.BatchNormalization(dtype="float64")

    def call(self, x, training=True):
        return x + tf.nn.relu(self.norm(self.convolution(x), training=training))


class Recurrent(keras.layers.Layer):
    """A loop, and a draw that advances a generator's state."""

    def __init__(self, **options):
        super().__init__(dtype="float64", **options)
        self.recurrent = keras.layers.LSTM(3, return_sequences=True, dtype="float64")
        self.down = keras.layers.Dense(3, "tanh", dtype="float64")

    def call(self, x):
        return x + tf.nn.dropout(tf.tanh(self.down(self.recurrent(x))), 0.2, seed=3)


class Reversible(keras.layers.Layer):
    """Custom gradients, one of which recomputes on its own."""

    def __init__(self, **options):
        super().__init__(dtype="float64", **options)
        self.dense = keras.layers.Dense(3, dtype="float64")

    def call(self, x):
        @tf.recompute_grad
        def again(x):
            return tf.tanh(tf.sigmoid(x))

        @tf.custom_gradient
        def clipped(x):
            y = tf.exp(x)
            return y, lambda dy: tf.clip_by_value(dy, -1.0, 1.0) * y

        return x + clipped(again(self.dense(x)))


MODELS = {
    "dense": ((3,), lambda: [keras.layers.Dense(3, "gelu", dtype="float64") for _ in range(4)]),
    "attention": ((4, 6), lambda: [Attention(6, seed) for seed in range(2)]),
    "convolution": ((4, 4, 3), lambda: [Convolution() for _ in range(2)]),
    "recurrent": ((4, 3), lambda: [Recurrent() for _ in range(2)]),
    "reversible": ((3,), lambda: [Reversible() for _ in range(2)]),
}


@cache
def captured(name, jit_compile=False, penalty=False):
    """Returns a captured step of a model, and its batches."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    shape, layers = MODELS[name]
    model = keras.Sequential([keras.Input(shape, dtype="float64"), *layers()])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def loss_of(x, y):
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    def step(x, y):
        with tf.GradientTape() as tape:
            if penalty:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = loss_of(x, y)
                loss += tf.reduce_mean(tf.square(inner.gradient(loss, x)))
            else:
                loss = loss_of(x, y)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    draw = np.random.default_rng(3)
    batches = [[draw.normal(size=(rows, *shape)) for _ in range(2)] for rows in (5, 4)]
    return capture(step, *batches[0], is_global=True, jit_compile=jit_compile), batches


def plans(step, workers, replicas, **options):
    """Returns the plans without and with recomputation."""
    keeping, again = (plan(step, workers, replicas, **options) for _ in range(2))
    for block in find_blocks(step, True):
        again.recomputed_blocks.add(name=block.name, scopes=block.scopes)
    return keeping, again


def ops(step, is_copy=False):
    nodes = (n for n in step.graph_def.node if copied_for(n.name) or not is_copy)
    return Counter(node.op for node in nodes)


LAYOUTS: list[tuple[str, int, int, Mapping[str, object]]] = [
    ("dense", 1, 1, {}),
    ("dense", 2, 2, {}),
    ("attention", 2, 1, {"owners": True}),
    ("convolution", 2, 1, {}),
    ("recurrent", 1, 2, {}),
    ("reversible", 2, 1, {}),
]


OPTIMIZED = {"convolution", "reversible"}
"""Models whose graphs TensorFlow optimizes; for the others this takes longer than their training."""


@pytest.mark.parametrize(("name", "workers", "replicas", "options"), LAYOUTS)
def test_no_bit_is_another_and_nothing_is_drawn_or_written_twice(name, workers, replicas, options):
    function, batches = captured(name)
    owners = {v.name: k % workers for k, v in enumerate(function.step.variables)} if options else None
    keeping, again = (
        Session(function, one, is_optimized=name in OPTIMIZED)
        for one in plans(function.step, workers, replicas, owners=owners)
    )
    for kept, made in zip(keeping.steps, again.steps, strict=True):
        assert ops(made, is_copy=True)
        assert not (ops(made) - ops(kept)).keys() & (WRITES | DRAWS)
    assert again.train(batches).bits == keeping.train(batches).bits


def test_a_gradient_of_a_gradient_has_the_same_bits():
    function, batches = captured("dense", penalty=True)
    keeping, again = (Session(function, one) for one in plans(function.step, 1, 2))
    assert len(again.steps[0].backward) == 2
    scopes = set(map(copied_for, again.steps[0].graph_index.nodes))
    assert scopes == {"", "-recomputed", "-recomputed_1"}
    assert again.train(batches).bits == keeping.train(batches).bits


def test_copies_wait_for_a_cotangent_and_originals_are_read_by_the_forward_pass_alone():
    function, _ = captured("attention")
    (step,) = Session(function, plans(function.step, 1, 2)[1]).steps
    backward = function.step.graph_index.nodes.keys() & step.backward[0]
    copies = [node for node in step.graph_def.node if copied_for(node.name)]
    waits = {node_of(i) for node in copies for i in node.input if is_control(i)}
    assert waits
    assert {step.replica_of(name)[1] for name in waits} <= backward | {None}
    masks = [node for node in copies if node.op.startswith("StatelessRandom")]
    assert masks
    originals = {node.name.removesuffix("-recomputed") for node in copies}
    for name in originals & step.graph_index.nodes.keys():
        readers = {step.replica_of(c)[1] for c in step.graph_index.consumers[name] if not copied_for(c)}
        assert not [c for c in readers & backward if function.step.graph_index.nodes[c].op.endswith("Grad")]


def test_xla_computes_again_in_functions_of_its_own():
    function, (_, batch) = captured("dense", jit_compile=True)
    batches = [batch, batch]  # of one length, since XLA compiles for each
    keeping, again = (Session(function, one) for one in plans(function.step, 1, 2))
    calls = [ops(session.steps[0])["StatefulPartitionedCall"] for session in (keeping, again)]
    assert calls[1] > calls[0]
    for kept, made in zip(keeping.train(batches).variables, again.train(batches).variables, strict=True):
        for name in kept:
            np.testing.assert_allclose(made[name], kept[name], rtol=1e-9, atol=1e-12, err_msg=name)
