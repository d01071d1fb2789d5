"""Partial values that nodes pass on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from autodist.kernels import Context, rewrite
from autodist.kernels.shard.partials import Operand, Passed, passed_on
from autodist.kernels.shard.reshards import Reshard, ReshardKind
from autodist.kernels.shard.transfers import State
from tests.unit.kernels.in_one_process import Session, assert_same, capture, on_mesh, one_device

LARGE = 1 << 20


def operand(*partial: str, how: str = "sum", elements: int = 1, can_stay: bool = True) -> Operand:
    return Operand(State((), partial, how), can_stay, elements)


WHOLE = Operand(None, False, 1)


def passed(op: str, *operands: Operand, elements: int = 1, is_integer: bool = False) -> Passed | None:
    return passed_on(op, operands, elements, 8, is_integer)


def test_whole_summands_count_on_the_first_place():
    assert passed("AddN", operand("a"), WHOLE, operand("a")) == Passed([0, 2], {1: ("a",)}, ("a",), "sum")


def test_summands_that_are_partial_over_other_axes_count_once_along_the_rest():
    found = passed("Pack", operand("a"), operand("a", "b"), operand("b"))
    assert found == Passed([0, 1, 2], {0: ("b",), 2: ("a",)}, ("a", "b"), "sum")


def test_a_large_sum_stays_partial_only_if_it_is_smaller_than_its_partial_summands():
    one, two = operand("a", elements=LARGE), Operand(None, False, LARGE)
    assert passed("AddV2", one, two, elements=LARGE) is None
    assert passed("AddN", one, one, two, elements=LARGE) is not None
    assert passed("AddV2", one, one, elements=LARGE) is not None


def test_a_factor_of_a_product_stays_partial():
    assert passed("Mul", operand("a"), WHOLE) == Passed([0], {}, ("a",), "sum")
    assert passed("Mul", operand("a"), operand("a")) is None
    assert passed("RealDiv", WHOLE, operand("a")) is None


def test_integer_quotients_are_computed_from_sums():
    assert passed("Div", operand("a"), WHOLE) is not None
    assert passed("Div", operand("a"), WHOLE, is_integer=True) is None


@pytest.mark.parametrize(("op", "how", "goes"), [
    ("Pack", "min", True), ("All", "min", True), ("LogicalAnd", "min", True), ("Any", "min", False),
    ("LogicalOr", "max", True), ("Maximum", "max", True), ("Minimum", "max", False), ("Neg", "max", False),
    ("Pack", "mean", False),
])  # fmt: skip
def test_extremes_pass_moves_and_extremes_of_their_kind(op, how, goes):
    found = passed(op, operand("a", how=how), WHOLE)
    assert found == (Passed([0], {}, ("a",), how) if goes else None)


@pytest.mark.parametrize("op", ["Enter", "Merge", "NextIteration", "Exit"])
def test_partial_values_enter_no_loop(op):
    assert passed(op, operand("a")) is None


def test_values_that_others_read_are_reduced_first():
    assert passed("Neg", operand("a", can_stay=False)) is None


def statistics(x: tf.Tensor, w: tf.Variable, v: tf.Variable) -> list[tf.Tensor]:
    """Sums, flags and extremes of tensors that are divided, and of one that is whole."""
    y, z = tf.tanh(x @ w), tf.tanh(x @ v)
    norm = tf.sqrt(tf.reduce_sum(tf.stack([tf.nn.l2_loss(y), tf.nn.l2_loss(z), tf.nn.l2_loss(x)])))
    flags = [tf.reduce_all(y > -0.9), tf.reduce_all(z > -0.9), tf.reduce_all(x > -9.0)]
    largest = tf.maximum(tf.reduce_max(y), tf.maximum(tf.reduce_max(z), tf.reduce_max(x)))
    return [norm, tf.cast(tf.reduce_all(flags), x.dtype), largest]


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 2, "b": 2}])
def test_several_statistics_take_one_transfer_of_each_kind(sizes):
    rng = np.random.default_rng(0)
    w, v = (tf.Variable(rng.normal(size=(4, 8)), name=name, trainable=False) for name in "wv")
    batches = [[rng.normal(size=(3, 4))], [5.0 * rng.normal(size=(3, 4))]]

    def step(x):
        found = statistics(x, w, v)
        w.assign_add(found[0] * tf.ones_like(w))
        return found

    captured = capture(step, *batches[0], is_whole=True)
    strategy = on_mesh(captured.step, sizes, {"w": "[–, a]", "v": "[–, b]" if "b" in sizes else "[–, a]"})
    kinds: Counter[ReshardKind] = Counter()

    def count(kernel, step):
        if kernel == "shard-tensors":
            kinds.update(one.kind for node in step.graph_def.node if (one := Reshard.of(node)))

    rewrite(captured.step, Context(strategy, 0), also=count)
    assert kinds[ReshardKind.ALL_REDUCE] == 3
    assert_same(Session(captured, strategy).train(batches), one_device(captured, step, batches))
