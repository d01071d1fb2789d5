"""Recomputed blocks read the parameters that are gathered for the backward pass: none is kept from the forward pass."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.blocks import find_blocks
from autodist.graph.parameter_uses import ParameterUses
from autodist.graph.recomputation import copied_for
from autodist.kernels import Context, rewrite
from autodist.kernels.place.gather_layers import GATHER, gathered_again
from tests.unit.kernels.in_one_process import Session, assert_same, capture, on_mesh, one_device
from tests.unit.kernels.place.test_gather_layers import machines, planned

LAYERS = 9
FEW = 5
"""So few that each kernel, above 1/8 of the model, is gathered apart from its bias."""

WIDTH = 5


@cache
def deep(length, layers=FEW):
    """Blocks of some layers, each of which casts its kernel and adds a bias; SGD with momentum."""
    rng = np.random.default_rng(3)
    kernels = [tf.Variable(rng.normal(size=(WIDTH, WIDTH)), name=f"layer_{k}/kernel") for k in range(layers)]
    biases = [tf.Variable(rng.normal(size=WIDTH), name=f"layer_{k}/bias") for k in range(layers)]
    weights = [*kernels, *biases]
    momenta = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    def step(x):
        with tf.GradientTape() as tape:
            for k, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
                with tf.name_scope(f"block_{k // length}/layer_{k}/"):
                    x = x + tf.tanh(tf.tanh(x) @ tf.transpose(2.0 * kernel) + tf.exp(bias))
            loss = tf.reduce_mean(tf.square(x))
        for weight, momentum, gradient in zip(weights, momenta, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * momentum.assign(0.9 * momentum + gradient))
        return loss

    batches = [(rng.normal(size=(n, WIDTH)),) for n in (7, 4, 1)]
    captured = capture(step, *batches[0])
    return captured, batches, one_device(captured, step, batches)


def with_blocks(strategy, step, choice=True):
    for block in find_blocks(step, choice):
        strategy.recomputed_blocks.add(name=block.name, scopes=block.scopes)
    return strategy


@pytest.mark.parametrize(
    ("length", "layers", "workers", "replicas", "prefetch"),
    [(1, FEW, 3, 1, 0), (2, LAYERS, 2, 2, 1), (FEW, FEW, 2, 1, 0)],
)
def test_training_is_that_of_one_device_and_no_bit_changes(length, layers, workers, replicas, prefetch):
    captured, batches, alone = deep(length, layers)
    spec, blocks = machines(workers, replicas), ["block_."]
    keeping = Session(captured, planned(captured, spec, prefetch=prefetch))
    again = Session(captured, with_blocks(planned(captured, spec, prefetch=prefetch), captured.step, blocks))
    assert all(any(map(copied_for, step.graph_index.nodes)) for step in again.steps)
    found = again.train(batches)
    assert_same(found, alone, rtol=1e-9)
    assert found.bits == keeping.train(batches).bits


def test_variables_that_the_data_axis_of_a_mesh_divides_are_gathered_again_too():
    captured, batches, alone = deep(1)
    layouts = {f"layer_{k}/kernel": "[data, –]" if k % 2 else "[–, data]" for k in range(FEW)}
    layouts |= {f"layer_{k}/bias": "[data]" for k in range(FEW)}
    strategy = with_blocks(on_mesh(captured.step, {"data": 2, "model": 2}, layouts), captured.step)
    assert_same(Session(captured, strategy).train(batches), alone, rtol=1e-9)


@pytest.mark.parametrize("length", [1, 2])
def test_copies_and_gradients_read_the_second_gather_alone(length):
    captured, _, _ = deep(length, LAYERS)
    strategy, seen = with_blocks(planned(captured, machines(2), prefetch=0), captured.step, ["block_."]), {}
    rewrite(captured.step, Context(strategy, 0), also=seen.setdefault)
    step = seen["recompute-blocks"]
    handle_of = {n.name: n.input[0].partition("/shard_")[0] for n in step.graph_def.node if GATHER in n.attr}
    uses = ParameterUses(step.graph_index, handle_of)
    copies = [node.name for node in step.graph_def.node if copied_for(node.name)]
    read = {name for copy in copies for name in uses.derived.get(copy, ())}
    first = {name for name in read if not name.startswith(gathered_again(""))}
    assert {handle_of[name] for name in read} == set(handle_of.values())
    assert {handle_of[name] for name in first} == {h for h in handle_of.values() if f"layer_{LAYERS - 1}/" in h}
