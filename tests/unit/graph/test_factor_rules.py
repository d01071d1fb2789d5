"""Factor rules: an op on parts of its operands, combined as its rule says, returns what it returns for the whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.graph.ops import FACTORED, FactorRule, OpView, ReducedBy, Trait, factor_rule, having
from tests.unit.graph.drawn_calls import CASES, ELEMENTWISE, NOT_RUN, SINGLE, elementwise
from tests.unit.graph.op_calls import Call, Draw

COMBINE: dict[ReducedBy, Callable[[list[np.ndarray], list[float]], np.ndarray]] = {
    ReducedBy.SUM: lambda parts, shares: np.add.reduce(parts),
    ReducedBy.MEAN: lambda parts, shares: np.tensordot(shares, parts, 1),
    ReducedBy.MAX: lambda parts, shares: np.maximum.reduce(parts),
    ReducedBy.MIN: lambda parts, shares: np.minimum.reduce(parts),
    ReducedBy.PRODUCT: lambda parts, shares: np.multiply.reduce(parts),
    ReducedBy.NORM: lambda parts, shares: np.sqrt(np.add.reduce(np.square(parts))),
}


class View(OpView):
    """An op of a graph, whose operands are constants."""

    def __init__(self, op: tf.Operation) -> None:
        self._op, self.node, self.inputs = op, op.node_def, [tensor.name for tensor in op.inputs]

    def shape(self, index: int) -> tf.TensorShape:
        return self._op.inputs[index].shape

    def constant(self, index: int) -> np.ndarray | None:
        return tf.get_static_value(self._op.inputs[index])


def view_of(call: Call) -> View:
    with tf.Graph().as_default():
        made = call.made([tf.constant(operand) for operand in call.operands])
        return View(made[0].op)


def check(draw: Draw, call: Call, tolerance: float = 1e-12) -> None:
    """Asserts for each factor of an op that its parts combine to the whole."""
    rule = factor_rule(view_of(call))
    assert rule is not None
    whole = call.run()
    factors = dict.fromkeys(factor for axes in rule.operands for factor in axes or () if factor is not None)
    for factor in factors:
        length = max(np.shape(o)[k] for i, o in enumerate(call.operands) if (k := rule.axis(i, factor)) is not None)
        if length < 2:
            continue
        sizes = draw.parts(length)
        parts = [
            call.run([_part(rule, factor, k, o, sizes, index) for k, o in enumerate(call.operands)])
            for index in range(len(sizes))
        ]
        for result, expected in enumerate(whole):
            axis, made = rule.result_axis(factor, result), [part[result] for part in parts]
            if axis is not None:
                combined = np.concatenate(made, axis)
            elif rule.reduced is not None:
                combined = COMBINE[rule.reduced](made, [size / length for size in sizes])
            else:
                continue
            message = f"{call.op}: factor {factor}, result {result}"
            if expected.dtype.kind in "fc":
                np.testing.assert_allclose(combined, expected, rtol=tolerance, atol=tolerance, err_msg=message)
            else:
                np.testing.assert_array_equal(combined, expected, err_msg=message)


def _part(rule: FactorRule, factor: str | int, index: int, operand: object, sizes: list[int], part: int) -> object:
    if index in rule.lengths:
        axis = rule.result_axis(factor)
        return [sizes[part] if k == axis else length for k, length in enumerate(np.asarray(operand).tolist())]
    axis = rule.axis(index, factor)
    if axis is None or np.shape(operand)[axis] == 1:
        return operand
    start = sum(sizes[:part])
    return np.take(operand, range(start, start + sizes[part]), axis)


@pytest.mark.parametrize("op", sorted(CASES.keys() - NOT_RUN.keys()))
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_parts_of_an_op_combine_to_the_whole(op, data):
    draw = Draw(data)
    check(draw, CASES[op](draw), 1e-5 if op in SINGLE else 1e-12)


@pytest.mark.parametrize("op", ELEMENTWISE)
@settings(max_examples=2, deadline=None)
@given(st.data())
def test_parts_of_an_elementwise_op_combine_to_the_whole(op, data):
    draw = Draw(data)
    check(draw, elementwise(draw, op), 1e-6)


def test_every_rule_is_run():
    assert having(Trait.ELEMENTWISE) <= FACTORED
    assert CASES.keys() <= FACTORED and NOT_RUN.keys() <= FACTORED
