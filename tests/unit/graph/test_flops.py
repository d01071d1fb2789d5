"""FLOPs of nodes by TensorFlow's formulas, and of layers (forward and backward), which balance pipeline stages."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.platform import tf_logging
from tensorflow.python.util import deprecation

from autodist.graph.flops import flops_of_nodes
from autodist.graph.layer_flops import OPEN_LENGTH, layer_flops
from autodist.graph.partial_count import PartialCount
from autodist.resources import ResourceSpec
from autodist.strategies import Pipeline
from tests.unit.kernels.in_one_process import capture
from tests.unit.kernels.pipelined.models import batches, made


def counted(make, *shapes):
    with tf.Graph().as_default() as graph:
        name = make(*(tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes)).op.name
        return flops_of_nodes(graph).get(name, 0)


@pytest.mark.parametrize(
    ("equation", "shapes", "products"),
    [
        ("ij,jk->ik", [(2, 3), (3, 5)], 2 * 30),
        ("...d,dhk->...hk", [(7, 4, 3), (3, 2, 5)], 2 * 7 * 4 * 3 * 2 * 5),
        ("a...b,b...->a...", [(2, 3, 5), (5, 1)], 2 * 30),
        ("ij->ji", [(2, 3)], 6),
    ],
)
def test_an_einsum_counts_each_product_of_elements(equation, shapes, products):
    assert counted(lambda *given: tf.raw_ops.Einsum(inputs=given, equation=equation), *shapes) == products


def test_a_product_counts_as_tensorflow_counts_it():
    assert counted(tf.matmul, (8, 3), (3, 5)) == 2 * 8 * 3 * 5


def test_nobody_is_told_what_is_deprecated_in_tensorflows_own_formulas(monkeypatch):
    warnings = []
    monkeypatch.setattr(deprecation, "_PRINTED_WARNING", {})  # each is logged once per process
    monkeypatch.setattr(tf_logging, "warning", lambda message, *args: warnings.append(message))
    assert counted(tf.matmul, (8, 3), (3, 5)) == 2 * 8 * 3 * 5
    assert not warnings


def test_what_has_no_shape_is_not_known_and_not_nothing():
    assert counted(tf.matmul, (None, 3), (3, 5)) is None
    assert counted(lambda x: tf.raw_ops.PartitionedCall(args=[x], Tout=[tf.float32], f=doubled())[0], (2,)) is None
    assert counted(lambda x: tf.reshape(x, [-1]), (2, 3)) == 0


def doubled():
    return tf.function(lambda x: 2 * x).get_concrete_function(tf.TensorSpec((2,)))


def test_a_sum_over_axes_that_are_not_known_counts_its_elements():
    with tf.Graph().as_default() as graph:
        axes = tf.compat.v1.placeholder(tf.int32, (None,))
        name = tf.reduce_sum(tf.zeros((4, 6)), axes).op.name
        assert flops_of_nodes(graph)[name] == 24


def test_a_sum_of_which_a_part_is_not_known_is_told_as_the_least():
    assert PartialCount.of([3, None, 4]) == PartialCount(7, is_least=True)
    assert PartialCount.of([3, None, 4]).known == 7
    assert PartialCount.of([None]).known is None
    assert PartialCount.of([]).known == 0


def test_layers_count_forward_and_back_wherever_their_variables_are_used():
    captured = capture(made("tied"), *batches("tied", [3])[0])
    names = list(dict.fromkeys(g.variable for g in captured.step.gradients))
    layers = [[name] for name in sorted(names)]
    table, *kernels, last = layer_flops(captured.step, layers)
    assert table == 11 * 5  # a lookup computes nothing; its two gradients are added
    product = 2 * OPEN_LENGTH * 5 * 5
    for flops in kernels:  # forward, gradients of inputs and of weights, plus elementwise ops
        assert 3 * product <= flops <= 3 * product + 10 * OPEN_LENGTH * 5
    logits = 2 * OPEN_LENGTH * 5 * 11
    assert last > 3 * product + 2 * logits  # the loss counts for the last layer, which computes its rows


def test_of_a_step_that_does_not_bear_such_lengths_nothing_is_counted():
    kernel = tf.Variable(np.eye(7), name="layer/kernel")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reshape(x, [-1, 7]) @ kernel)
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    item = capture(step, np.zeros((14,))).step
    assert OPEN_LENGTH % 7
    assert layer_flops(item, [["layer/kernel"]]) is None


def test_stages_by_number_share_the_work_and_not_the_bytes():
    """A table with nearly all bytes and no computation, before layers of equal cost."""
    table = tf.Variable(np.zeros((1000, 4)), name="table/rows")
    kernels = [tf.Variable(np.eye(4), name=f"layer_{k}/kernel") for k in range(4)]
    every = [table, *kernels]

    def step(words):
        with tf.GradientTape() as tape:
            h = tf.gather(table, words)
            for kernel in kernels:
                h = tf.tanh(h @ kernel)
            loss = tf.reduce_mean(tf.square(h))
        gradients = tape.gradient(loss, every)
        table.scatter_sub(gradients[0])
        for kernel, gradient in zip(kernels, gradients[1:], strict=True):
            kernel.assign_sub(gradient)
        return loss

    item = capture(step, np.arange(6)).step
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
    found = [Pipeline(micro_batches=2).build(item, spec) for _ in range(2)]
    assert found[0].SerializeToString(deterministic=True) == found[1].SerializeToString(deterministic=True)
    stage_of = {node.variable: node.parameter_server.owner for node in found[0].nodes}
    assert stage_of == {
        "table/rows": 0,
        "layer_0/kernel": 0,
        "layer_1/kernel": 0,
        "layer_2/kernel": 1,
        "layer_3/kernel": 1,
    }
