"""Kinds of tensors in small graphs, one family of ops a test."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.propagation import (
    Elements,
    Examples,
    Mean,
    PerExample,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
    propagate,
)
from tests.unit.graph.propagation_graphs import Case

SIZES = (1, 4, 2)
MEAN = Mean(Examples())


@pytest.fixture
def case():
    """A graph with a batch of vectors `x`, of sequences `s`, of labels `y` and of masks `m`."""
    built = Case()
    with built.graph.as_default():
        built.batch("x", 3)
        built.batch("s", None, 4)
        built.batch("y", dtype=tf.int64)
        built.batch("m", None, dtype=tf.bool)
        yield built


@pytest.fixture
def feeds():
    rng = np.random.default_rng(3)
    return {
        "x": rng.uniform(0.5, 2, (7, 3)),
        "s": rng.uniform(0.5, 2, (7, 5, 4)),
        "y": rng.integers(0, 3, 7),
        "m": rng.uniform(size=(7, 5)) > 0.4,
    }


def tensor(case, name):
    return case.graph.get_tensor_by_name(f"{name}:0")


def check(case, feeds, expected):
    """Each tensor has its kind, and what the kind promises holds in numbers."""
    kinds = case.assert_joins([value for value, _ in expected], feeds, SIZES)
    assert kinds == [kind for _, kind in expected]


def reason(case, value):
    kind = case.kind(value)
    assert isinstance(kind, Unknown), kind
    assert value.op.name in kind.reason
    assert value.op.type in kind.reason
    return kind.reason


def test_inputs_constants_and_variables(case, feeds):
    scale = tf.compat.v1.get_variable("scale", initializer=np.float64(2), use_resource=True)
    rate = tf.compat.v1.placeholder_with_default(np.float64(0.5), [], name="rate")
    check(
        case,
        feeds,
        [
            (tensor(case, "x"), PerExample(0)),
            (scale.read_value(), Replicated()),
            (rate * scale, Replicated()),
            (tensor(case, "x") * scale + rate, PerExample(0)),
            (tf.constant([1.0, 2.0]), Replicated()),
        ],
    )


def test_reductions(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    check(
        case,
        feeds,
        [
            (tf.reduce_sum(x), Sum()),
            (tf.reduce_sum(x, 0), Sum()),
            (tf.reduce_sum(x, 1), PerExample(0)),
            (tf.reduce_mean(x), MEAN),
            (tf.reduce_mean(x, 0), MEAN),
            (tf.reduce_mean(s), MEAN),
            (tf.reduce_mean(s, [1, 2]), PerExample(0)),
            (tf.reduce_max(s, -1, keepdims=True), PerExample(0)),
            (tf.nn.l2_loss(x), Sum()),
            (tf.reduce_mean(tf.transpose(s, [1, 0, 2]), 0), PerExample(0)),
        ],
    )


@pytest.mark.parametrize("reduce", [tf.reduce_max, tf.reduce_min, tf.reduce_prod, tf.math.reduce_euclidean_norm])
def test_other_reductions_over_the_batch_are_unknown(case, reduce):
    assert "reduces over the batch" in reason(case, reduce(tensor(case, "x")))


def test_counts_of_examples_and_of_elements(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    check(
        case,
        feeds,
        [
            (tf.shape(x)[0], Sum()),
            (tf.size(s), Sum()),
            (tf.reduce_prod(tf.shape(s)), Sum()),
            (tf.shape(x)[1], Replicated()),
            (tf.shape(s)[1], Replicated()),
            (tf.reduce_sum(s) / tf.cast(tf.size(s), tf.float64), MEAN),
            (tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float64), MEAN),
            (tf.reduce_sum(x) * (1 / tf.cast(tf.shape(x)[0], tf.float64)), MEAN),
            (tf.reduce_sum(x) / 7.0, Sum()),
        ],
    )
    assert "shape that holds the size of the batch" in case.kind(tf.shape(x)).reason


def test_quotients_of_sums_are_means_with_the_denominator_as_weight(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    mask = tf.cast(tensor(case, "m"), tf.float64)
    valid = tf.reduce_sum(mask)
    share = tf.reduce_mean(mask)
    per_row = tf.reduce_sum(s, -1)
    weighted = Mean(Scalar(valid.name))
    check(
        case,
        feeds,
        [
            (tf.reduce_sum(per_row * mask) / valid, weighted),
            (tf.math.divide_no_nan(tf.reduce_sum(per_row * mask), valid), weighted),
            (tf.reduce_sum(per_row * mask) / tf.maximum(valid, 1), weighted),
            (tf.where(valid > 0, tf.reduce_sum(per_row * mask) / valid, 0), weighted),
            (tf.reduce_mean(per_row * mask) / share, Mean(Total(share.name, Examples()))),
            (tf.reduce_mean(per_row * tf.where(mask > 0, tf.cast(tf.size(mask), tf.float64) / valid, 0)), weighted),
        ],
    )
    assert "that is no sum" in reason(case, tf.maximum(tf.reduce_sum(x), 1))


def test_boolean_mask_weighs_by_the_rows_that_it_leaves(case, feeds):
    s, m = tensor(case, "s"), tensor(case, "m")
    kept = tf.boolean_mask(s, m)
    kinds = case.assert_joins([kept, tf.reduce_mean(kept)], feeds, SIZES)
    assert kinds[0] == PerExample(0)
    assert isinstance(kinds[1], Mean)
    assert isinstance(kinds[1].weight, Elements)


def test_sums_of_kinds(case, feeds):
    x = tensor(case, "x")
    penalty = tf.nn.l2_loss(tf.constant([1.0, 2.0], tf.float64))
    check(
        case,
        feeds,
        [
            (tf.reduce_mean(x) + penalty, MEAN),
            (tf.add_n([tf.reduce_mean(x), penalty, tf.reduce_mean(x * x)]), MEAN),
            (tf.reduce_sum(tf.stack([tf.reduce_mean(x), penalty])), MEAN),
            (tf.reduce_sum(x) + tf.reduce_sum(x * x), Sum()),
            (0.0 + tf.reduce_sum(x), Sum()),
            (2 * tf.reduce_sum(x) - 0.5 * tf.reduce_sum(x * x), Sum()),
        ],
    )
    assert "does not depend on the batch" in reason(case, tf.reduce_sum(x) + penalty)


def test_means_of_different_weights_do_not_add_up(case):
    x = tensor(case, "x")
    mask = tf.reduce_sum(tf.cast(tensor(case, "m"), tf.float64))
    masked = tf.reduce_sum(x) / mask
    assert "different weights" in reason(case, masked + tf.reduce_mean(x))
    assert "sums and means" in reason(case, tf.reduce_mean(x) + tf.reduce_sum(x))


@pytest.mark.parametrize("function", [tf.sqrt, tf.exp, tf.square, tf.math.log, tf.abs])
def test_other_functions_of_means_and_sums_are_unknown(case, function):
    x = tensor(case, "x")
    assert isinstance(case.kind(function(tf.reduce_mean(x))), Unknown)
    assert isinstance(case.kind(function(tf.reduce_sum(x))), Unknown)
    assert case.kind(function(x)) == PerExample(0)


def test_broadcasting_counts_axes_from_the_right(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    row = tf.reduce_sum(x, 1)
    check(
        case,
        feeds,
        [
            (s * tf.constant([1.0, 2, 3, 4], tf.float64), PerExample(0)),
            (row[:, None] * x, PerExample(0)),
            (row[None, :] * tf.ones([2, 1], tf.float64), PerExample(1)),
            (s * row[:, None, None], PerExample(0)),
        ],
    )
    assert "different axes" in reason(case, row - row[:, None])
    assert "positions in the batch" in reason(case, row * tf.constant(np.arange(7.0)))


def test_layout(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    n, t = tf.shape(s)[0], tf.shape(s)[1]
    flat = tf.reshape(s, [-1, 4])
    check(
        case,
        feeds,
        [
            (flat, PerExample(0)),
            (tf.reshape(flat, [-1, t, 4]), PerExample(0)),
            (tf.reshape(flat, [n, t, 4]), PerExample(0)),
            (tf.reshape(s, [n, -1]), PerExample(0)),
            (tf.reshape(x, [1, -1, 3]), PerExample(1)),
            (tf.transpose(s, [1, 0, 2]), PerExample(1)),
            (tf.expand_dims(x, 0), PerExample(1)),
            (tf.expand_dims(x, -1), PerExample(0)),
            (tf.squeeze(tf.expand_dims(x, 0), 0), PerExample(0)),
            (s[:, 0], PerExample(0)),
            (s[..., 1:3], PerExample(0)),
            (s[:, ::-1, tf.newaxis, 2], PerExample(0)),
            (tf.slice(x, [0, 1], [-1, 2]), PerExample(0)),
            (tf.pad(x, [[0, 0], [1, 2]]), PerExample(0)),
            (tf.tile(x, [1, 2]), PerExample(0)),
            (tf.repeat(x, 2, 1), PerExample(0)),
            (tf.reverse(x, [1]), PerExample(0)),
            (tf.cumsum(x, 1), PerExample(0)),
            (tf.concat([x, x], 1), PerExample(0)),
            (tf.stack([x, x]), PerExample(1)),
            (tf.unstack(x, axis=1)[2], PerExample(0)),
            (tf.split(x, [1, 2], 1)[1], PerExample(0)),
        ],
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0],
        lambda x: x[1:],
        lambda x: x[::-1],
        lambda x: tf.slice(x, [1, 0], [-1, -1]),
        lambda x: tf.pad(x, [[0, 1], [0, 0]]),
        lambda x: tf.tile(x, [2, 1]),
        lambda x: tf.cumsum(x, 0),
        lambda x: tf.reverse(x, [0]),
        lambda x: tf.gather(x, [0]),
        lambda x: tf.nn.softmax(x, axis=0),
        lambda x: tf.sort(x, axis=0),
        lambda x: tf.matmul(x, x, transpose_b=True),
        lambda x: tf.reshape(x, [3, -1]),
        lambda x: tf.range(tf.shape(x)[0]),
        lambda x: tf.argmax(x, 0),
        lambda x: tf.concat([x, tf.ones([1, 3], tf.float64)], 0),
        lambda x: tf.squeeze(tf.where(x[:, 0] > 1), 1),
    ],
)
def test_what_looks_at_positions_in_the_batch_is_unknown(case, function):
    assert isinstance(case.kind(function(tensor(case, "x"))), Unknown)


def test_batches_behind_one_another_keep_sums_and_means(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    both = tf.concat([x, 2 * x], 0)
    labels = tf.concat([tf.ones_like(x), tf.zeros_like(x)], 0)
    check(
        case,
        feeds,
        [
            (tf.reduce_mean(tf.square(both - labels)), MEAN),
            (tf.split(tf.tanh(both), 2)[1], PerExample(0)),
        ],
    )
    assert "not in their order" in case.kind(both).reason
    doubled = tf.reshape(s[:, :2, :3], [-1, 3])
    assert isinstance(case.kind(both * doubled), Unknown)


def test_products(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    kernel = tf.constant(np.random.default_rng(0).normal(size=(3, 2)))
    wide = tf.constant(np.random.default_rng(0).normal(size=(4, 2)))
    check(
        case,
        feeds,
        [
            (x @ kernel, PerExample(0)),
            (tf.matmul(kernel, x, transpose_a=True, transpose_b=True), PerExample(1)),
            (tf.matmul(x, x, transpose_a=True), Sum()),
            (tf.matmul(s, s, transpose_b=True), PerExample(0)),
            (tf.tensordot(s, wide, [[2], [0]]), PerExample(0)),
            (tf.einsum("btd,de->bte", s, wide), PerExample(0)),
            (tf.einsum("btd,bsd->ts", s, s), Sum()),
            (tf.einsum("b...,b...->...", x, x), Sum()),
            (tf.linalg.matvec(kernel, x, transpose_a=True), PerExample(0)),
        ],
    )
    assert "every other" in reason(case, tf.matmul(x, x, transpose_b=True))


def test_lookups(case, feeds):
    x, y = tensor(case, "x"), tensor(case, "y")
    table = tf.compat.v1.get_variable("table", initializer=np.eye(3), use_resource=True)
    check(
        case,
        feeds,
        [
            (tf.gather(table, y), PerExample(0)),
            (tf.nn.embedding_lookup(table, y), PerExample(0)),
            (tf.gather(table, y, axis=1), PerExample(1)),
            (tf.gather(x, [2, 0], axis=1), PerExample(0)),
            (tf.gather(x, y, axis=1, batch_dims=1), PerExample(0)),
            (tf.gather_nd(table, tf.stack([y, y], 1)), PerExample(0)),
            (tf.one_hot(y, 3), PerExample(0)),
            (tf.one_hot(y, 3, axis=0), PerExample(1)),
            (tf.math.unsorted_segment_sum(x, y, 3), Sum()),
        ],
    )
    assert isinstance(case.kind(tf.gather(tf.reduce_sum(x, 0), y)), Unknown)


def test_losses_of_one_op(case, feeds):
    x, y = tensor(case, "x"), tensor(case, "y")
    rows = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
    check(
        case,
        feeds,
        [
            (rows, PerExample(0)),
            (
                tf.nn.softmax_cross_entropy_with_logits(labels=tf.one_hot(y, 3, dtype=tf.float64), logits=x),
                PerExample(0),
            ),
            (tf.reduce_mean(tf.cast(tf.equal(tf.argmax(x, 1), y), tf.float64)), MEAN),
            (tf.reduce_mean(tf.cast(tf.math.in_top_k(y, tf.cast(x, tf.float32), 2), tf.float64)), MEAN),
            (tf.nn.log_softmax(x), PerExample(0)),
        ],
    )


def test_shapes_that_hold_the_batch_make_rows(case, feeds):
    x = tensor(case, "x")
    n = tf.shape(x)[0]
    check(
        case,
        feeds,
        [
            (tf.zeros([n, 2]), PerExample(0)),
            (tf.fill([3, n], 2.0), PerExample(1)),
            (tf.ones_like(x), PerExample(0)),
            (tf.broadcast_to(tf.constant([1.0, 2.0]), [n, 2]), PerExample(0)),
            (tf.tile(tf.constant([[1.0, 2.0]]), [n, 1]), PerExample(0)),
        ],
    )
    assert case.kind(tf.random.uniform(tf.shape(x))) == PerExample(0)


def test_random_numbers_of_a_fixed_shape_are_noise_beside_rows_only(case):
    x = tensor(case, "x")
    noise = tf.random.uniform([3], dtype=tf.float64)
    assert "each replica draws for itself" in case.kind(noise).reason
    assert case.kind(x * noise) == PerExample(0)
    assert isinstance(case.kind(tf.reduce_sum(x) * noise), Unknown)


def test_statistics_of_the_batch_leave_rows_but_say_so(case):
    x = tensor(case, "x")
    mean, variance = tf.nn.moments(x, [0])
    normal = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
    assert case.kind(mean) == MEAN
    assert isinstance(case.kind(variance), (Mean, Unknown))
    kind = case.kind(tf.reduce_mean(normal))
    assert kind == MEAN
    assert "batchnorm" in kind.mixed_at
    assert case.kind(tf.reduce_mean(x)).mixed_at is None


@pytest.mark.parametrize("axis", [0, 1])
def test_the_statistics_of_fused_batch_norm_are_over_all_but_the_channels(axis):
    case = Case()
    with case.graph.as_default():
        x = case.batch("images", 4, 5, 3, dtype=tf.float32, axis=axis)
        nothing = tf.constant([], tf.float32)
        normal, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=tf.ones(3), offset=tf.zeros(3), mean=nothing, variance=nothing, name="fused"
        )
    assert case.kind(normal) == PerExample(axis) and case.kind(normal).mixed_at == "fused"
    assert case.kind(mean) == MEAN
    assert "no mean of variances" in case.kind(variance).reason


def test_examples_along_the_channels_are_not_normalised_together():
    case = Case()
    with case.graph.as_default():
        x = case.batch("images", 4, 5, 3, dtype=tf.float32, axis=3)
        nothing, n = tf.constant([], tf.float32), tf.shape(x)[3:]
        fused = tf.raw_ops.FusedBatchNormV3(x=x, scale=tf.ones(n), offset=tf.zeros(n), mean=nothing, variance=nothing)
    assert isinstance(case.kind(fused.y), Unknown)


def test_a_scalar_that_is_not_understood_never_scales_rows(case):
    x = tensor(case, "x")
    assert isinstance(case.kind(tf.reduce_mean(x / tf.sqrt(tf.reduce_sum(x)))), Unknown)
    assert isinstance(case.kind(tf.reduce_mean(x / tf.reduce_max(x))), Unknown)


def test_unknown_ops_are_unknown_until_they_meet_rows_of_their_shape(case):
    x = tensor(case, "x")
    strange = tf.numpy_function(lambda v: v, [x], tf.float64)
    strange.set_shape([None, 3])
    assert "not in the table" in reason(case, strange)
    assert case.kind(strange - x) == PerExample(0)
    assert case.kind(tf.reduce_mean(strange - x)) == MEAN
    assert isinstance(case.kind(tf.reduce_mean(strange)), Unknown)
    assert isinstance(case.kind(tf.reduce_mean(strange) * x), Unknown)


def test_kinds_may_be_declared(case):
    x = tensor(case, "x")
    odd = tf.sqrt(tf.reduce_sum(x))
    doubled = 2 * odd
    shapes = {tensor.name: tensor.shape for op in case.graph.get_operations() for tensor in op.outputs}
    found = propagate(case.graph.as_graph_def(), {"x:0": 0}, shapes, declared={odd.name: MEAN})
    assert found.kind(doubled.name) == MEAN
    with pytest.raises(ValueError, match="cannot be declared"):
        propagate(case.graph.as_graph_def(), {}, shapes, declared={odd.name: Mean(Scalar("Sum:0"))})


def test_a_tensor_that_is_not_there(case):
    with pytest.raises(ValueError, match="no tensor 'nothing:0'"):
        case.propagation().kind("nothing:0")


def test_conditions_and_calls(case, feeds):
    x = tensor(case, "x")
    flag = tf.compat.v1.placeholder_with_default(True, [], name="flag")

    @tf.function
    def inner(value):
        return value @ tf.ones([3, 1], tf.float64), tf.reduce_sum(value)

    rows, total = inner(x)
    check(
        case,
        feeds,
        [
            (rows, PerExample(0)),
            (total, Sum()),
            (tf.cond(flag, lambda: tf.reduce_mean(x), lambda: tf.reduce_mean(x * 2)), MEAN),
            (tf.cond(flag, lambda: x, lambda: x * 2), PerExample(0)),
        ],
    )
    chosen = tf.cond(tf.reduce_all(x > 0), lambda: x, lambda: x * 2)
    assert case.kind(chosen) == PerExample(0)
    assert case.kind(chosen).mixed_at is not None


def test_loops_keep_rows(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    _, grown = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v) * 2), [0, x])
    scanned = tf.scan(lambda carry, now: carry * 0.5 + now, tf.transpose(s, [1, 0, 2]))
    _, loss = tf.while_loop(
        lambda i, v: i < tf.shape(s)[1],
        lambda i, v: (i + 1, v + tf.reduce_mean(s[:, i])),
        [0, tf.constant(0, tf.float64)],
    )
    check(case, feeds, [(grown, PerExample(0)), (scanned, PerExample(1)), (loss, MEAN)])


@pytest.fixture
def old_control_flow():
    """Loops and conditions as graphs had them before they were functions; scripts for TensorFlow 1 still do."""
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


@pytest.mark.usefixtures("old_control_flow")
def test_old_loops_keep_rows(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    flag = tf.compat.v1.placeholder_with_default(True, [], name="flag")
    _, grown = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v) * 2), [0, x])
    scanned = tf.scan(lambda carry, now: carry * 0.5 + now, tf.transpose(s, [1, 0, 2]))
    chosen = tf.cond(flag, lambda: x, lambda: x * 2)
    check(case, feeds, [(grown, PerExample(0)), (scanned, PerExample(1)), (chosen, PerExample(0))])
    assert {"NextIteration", "Merge", "TensorArrayV3"} <= {op.type for op in case.graph.get_operations()}


@pytest.mark.usefixtures("old_control_flow")
def test_old_loops_that_turn_rows_into_something_else_are_unknown(case):
    x, s = tensor(case, "x"), tensor(case, "s")
    _, mixed = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v + tf.cumsum(s, 0)), [0, s])
    start = [0, tf.constant(1, tf.float64), tf.constant(1, tf.float64)]
    _, _, ratio = tf.while_loop(lambda i, v, r: i < 3, lambda i, v, r: (i + 1, tf.reduce_sum(s[:, i]), v), start)
    assert isinstance(case.kind(ratio), Unknown)
    [grown] = tf.while_loop(lambda v: tf.reduce_max(v) < 100, lambda v: (v * 2,), [x])
    assert isinstance(case.kind(mixed), Unknown)
    assert isinstance(case.kind(grown), Unknown)


def test_names_inside_functions_are_not_those_outside(case, feeds):
    """A sum in a function and one outside may have one name: they must not cancel."""
    x, s = tensor(case, "x"), tensor(case, "s")
    outside = tf.reduce_sum(x)

    @tf.function
    def inner(value, divisor):
        return tf.reduce_sum(value) / divisor, tf.reduce_sum(value[:, 0])

    ratio, total = inner(s, outside)
    kinds = case.assert_joins([ratio / total, ratio, total], feeds, SIZES)
    assert isinstance(kinds[0], Unknown)
    assert isinstance(kinds[1], Unknown) or kinds[1] == Mean(Scalar(outside.name))
    assert kinds[2] == Sum()


def test_a_loop_that_runs_as_long_as_its_examples_ask_is_unknown(case):
    x = tensor(case, "x")
    [grown] = tf.while_loop(lambda v: tf.reduce_max(v) < 100, lambda v: (v * 2,), [x])
    assert "how often it runs" in case.kind(grown).reason


def test_the_walk_is_not_recursive_and_fast():
    graph = tf.Graph()
    with graph.as_default():
        value = tf.compat.v1.placeholder(tf.float32, [None], name="x")
    graph_def = graph.as_graph_def()
    previous = "x"
    for index in range(20_000):
        node = graph_def.node.add(name=f"n{index}", op="Tanh", input=[previous])
        node.attr["T"].type = tf.float32.as_datatype_enum
        previous = node.name
    began = time.process_time()
    kind = propagate(graph_def, {"x:0": 0}, lambda name: value.shape).kind(previous)
    assert kind == PerExample(0)
    assert time.process_time() - began < 3
