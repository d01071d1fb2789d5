"""The gradients that are compressed, the rejected ones, and each worker's persistent buffers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import Compressor, Float16, PowerSGD, TopK
from autodist.errors import StrategyError
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.kernels.communicate.reduce_by_shuffle import compressor_of
from autodist.kernels.plan import Plan
from autodist.placement.group import Group
from autodist.proto import strategy_pb2
from tests.unit.kernels.compressed_models import given_gradient
from tests.unit.kernels.in_one_process import capture, plan, rewritten, train
from tests.unit.kernels.wire import sent_bytes

Message = strategy_pb2.Compressor
FLOAT16 = Float16()
POWER_SGD = PowerSGD(rank=2)
TOP_K = TopK(fraction=0.1)
WORKERS = Group.of_workers([0, 1])


def pending(name="v", shape=(8, 6), dtype=tf.float32, is_sparse=False):
    local = ("i:0", "v:0") if is_sparse else ("v:0",)
    return PendingReduction(
        name, PendingReductionKind.GRADIENT, local, local, None, 1, dtype, tf.TensorShape(shape), WORKERS, "v"
    )


def plan_of(compressor, spec="SHUFFLE"):
    said = compressor.to_message() if isinstance(compressor, Compressor) else compressor
    shuffle = strategy_pb2.AllReduce(spec=spec, compressor=said)
    return Plan(strategy_pb2.Strategy(nodes=[strategy_pb2.VariableNode(variable="v", all_reduce=shuffle)]))


def test_one_worker_compresses_nothing():
    variable = tf.Variable(np.zeros((12, 10)), name="v")
    captured = capture(given_gradient(variable), np.zeros((3, 12, 10)))
    (step,) = rewritten(captured, plan(captured.step, 1, 3, compressor=POWER_SGD))
    assert not step.initializers and not sent_bytes(step)


def test_a_value_that_would_not_become_smaller_is_sent_uncompressed():
    rank_one = PowerSGD(rank=1)
    assert compressor_of(plan_of(rank_one), pending(shape=(8, 6))) == PowerSGD(1)
    assert compressor_of(plan_of(rank_one), pending(shape=(2, 2))) is None
    assert compressor_of(plan_of(rank_one), pending(shape=(100,))) is None
    assert compressor_of(plan_of(rank_one), pending(shape=())) is None
    assert compressor_of(plan_of(rank_one), pending(shape=(2, 3, 5))) == PowerSGD(1)
    assert compressor_of(plan_of(rank_one), pending(shape=(0, 5))) is None
    assert compressor_of(plan_of(TOP_K), pending(shape=(3,))) == TopK(0.1)
    assert compressor_of(plan_of(TOP_K), pending(shape=())) is None
    assert compressor_of(plan_of(TOP_K), pending(shape=(0,))) is None
    half = TopK(fraction=0.5)
    assert compressor_of(plan_of(half), pending()) is None
    assert compressor_of(plan_of(FLOAT16), pending()) == Float16()
    assert compressor_of(plan_of(FLOAT16), pending(dtype=tf.bfloat16)) is None
    assert compressor_of(plan_of(FLOAT16), pending(shape=(0, 3))) is None
    assert compressor_of(plan_of(None), pending()) is None


def test_only_gradients_are_compressed():
    state = PendingReduction(
        "state", PendingReductionKind.STATE, ("v:0",), ("v:0",), None, 1, tf.float32, tf.TensorShape([9, 9]), WORKERS
    )
    assert compressor_of(plan_of(FLOAT16), state) is None


@pytest.mark.parametrize(
    "asked, one, message",
    [
        (
            FLOAT16,
            pending(is_sparse=True),
            "v has the compressor FLOAT16, but its gradient is sparse: no compressor supports",
        ),
        (
            TOP_K,
            pending(dtype=tf.complex64),
            "v has the compressor TOP_K 10 % .*, but its dtype complex64 is not floating-point",
        ),
        (Message(kind="POWER_SGD", error_feedback=True), pending(), "rank is 0, which is not allowed: .* equal to 1"),
        (Message(kind="TOP_K", error_feedback=True), pending(), "fraction is 0.0, which is not .* greater than 0"),
        (Message(kind="TOP_K", error_feedback=True, fraction=1.5), pending(), "fraction is 1.5, which is not allowed"),
    ],
)
def test_gradients_that_cannot_be_compressed_are_refused(asked, one, message):
    with pytest.raises(StrategyError, match=message):
        compressor_of(plan_of(asked), one)


def mixed_step():
    variables = [tf.Variable(np.zeros((12, 10)), name=name) for name in "abc"]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((variables[0] + variables[1] * variables[2]) * x, [1, 2]))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)

    return capture(step, np.zeros((3, 12, 10)))


def test_compressors_never_share_a_bucket():
    captured = mixed_step()
    strategy = plan(captured.step, 2)
    strategy.nodes[0].all_reduce.compressor.CopyFrom(TOP_K.to_message())
    strategy.nodes[1].all_reduce.compressor.CopyFrom(FLOAT16.to_message())
    sent = sent_bytes(rewritten(captured, strategy)[0])
    assert {"largest", "piece", "sum", "whole"} <= set(sent)
    both = plan(captured.step, 2, compressor=FLOAT16)
    assert set(sent_bytes(rewritten(captured, both)[0])) == {"piece", "sum", "weight"}


def test_two_steps_of_one_variable_share_what_they_remember():
    """A second batch size is captured as another step; the residual of the first step must not be lost."""
    variable = tf.Variable(np.zeros((12, 10)), name="v")
    first, second = (
        rewritten(captured, plan(captured.step, 2, compressor=POWER_SGD))[0].initializers
        for captured in (capture(given_gradient(variable), np.zeros((n, 12, 10))) for n in (3, 4))
    )
    assert set(first) == set(second) and len(first) == 2


def test_variables_of_equal_names_remember_apart():
    """Two models of one script: their names in the session differ from those in the strategy."""
    found = []
    for shared_name in (b"model_1/v", b"model_2/v"):
        captured = capture(given_gradient(tf.Variable(np.zeros((12, 10)), name="v")), np.zeros((3, 12, 10)))
        handle = next(n for n in captured.step.graph_def.node if n.op == "VarHandleOp")
        handle.attr["shared_name"].s = shared_name
        found.append(rewritten(captured, plan(captured.step, 2, compressor=TOP_K))[0].initializers.keys())
    assert found[0].isdisjoint(found[1])


def test_shards_are_compressed_each_by_itself():
    gradient = np.random.default_rng(2).normal(size=(12, 10))
    captured = capture(given_gradient(tf.Variable(np.zeros((12, 10)), name="v")), np.zeros((3, 12, 10)))
    strategy = plan(captured.step, 2)
    (node,) = strategy.nodes
    node.ClearField("all_reduce")
    node.partition.CopyFrom(strategy_pb2.Partition(axis=0, sizes=[5, 7]))
    for compressor in (TOP_K, None):
        said = None if compressor is None else compressor.to_message()
        shuffle = strategy_pb2.AllReduce(spec=strategy_pb2.AllReduce.SHUFFLE, compressor=said)
        node.shards.append(strategy_pb2.Shard(all_reduce=shuffle))
    assert len(rewritten(captured, strategy)[0].initializers) == 1
    found = -train(captured, strategy, [(gradient[np.newaxis].repeat(4, 0),)]).variable("v")
    assert np.count_nonzero(found[:5]) == 5  # a tenth of 50, the same on both workers
    np.testing.assert_allclose(found[5:], gradient[5:], rtol=1e-12)
