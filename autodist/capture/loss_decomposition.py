"""Recomputes a loss that is arithmetic on a few values, so that it can be decomposed at each value.

    loss = 0.5 * (mean + sum)     becomes      0.5 * (mean' + sum'),   mean' = value(seed * mean)

The second loss is differentiated. `seed` is 1 and `value` is the identity unless a kernel replaces them: the seed sets
the weight of a replica's gradient of the value, and the value becomes that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.ops import Trait, having, linear_operands

SEED_NAME = "autodist_loss_weight"
VALUE_NAME = "autodist_loss_value"

MOST_ELEMENTS = 4096
"""Largest number of elements of a decomposition point; may be one for each class, but never one for each example."""


@dataclass(frozen=True)
class DecompositionPoint:
    """A value that a loss is computed from.

    Attributes:
        tensor: the script's tensor.
        seed: a scalar, 1 unless it is replaced, that multiplies the gradients through this value.
        value: the tensor that the loss is computed from; its gradient is that of `tensor`, times the seed.
        parts: indices of the decomposition points that this value is computed from by arithmetic. Empty if unknown.
    """

    tensor: tf.Tensor
    seed: tf.Tensor
    value: tf.Tensor
    parts: tuple[int, ...]


def decompose(
    targets: Sequence[tf.Tensor],
    ends: Collection[tf.Tensor],
    is_recorded: Callable[[tf.Tensor], bool] = lambda tensor: True,
) -> tuple[list[tf.Tensor], tuple[DecompositionPoint, ...]]:
    """Returns the tensors to differentiate in place of the targets, and their decomposition points, parts first.

    Args:
        targets: floats of one graph.
        ends: tensors at which gradients end; the search stops there.
        is_recorded: returns False for a tensor at which gradients end too, since no tape has recorded its operation.

    Returns:
        The targets and no points for a single target that is not computed from several values.
    """
    at = {id(t) for t in ends}
    arithmetic = _Arithmetic(targets, lambda t: id(t) in at or not is_recorded(t))
    if len(targets) == 1 and not arithmetic.again:
        return list(targets), ()
    apart, points = arithmetic.decompose()
    return (apart, points) if len(targets) > 1 or any(point.parts for point in points) else (list(targets), ())


class _Arithmetic:
    """The arithmetic that computes the targets.

    Attributes:
        again: the tensors to compute again, by id; all others are taken as they are.
    """

    def __init__(self, targets: Sequence[tf.Tensor], is_end: Callable[[tf.Tensor], bool]) -> None:
        self._targets = targets
        self._order = _in_order(targets, is_end)
        alike = _alike_everywhere(self._order, is_end)
        self.again = {
            id(t): t for t in self._order if id(t) not in alike and not is_end(t) and _operands(t) is not None
        }
        self._points: list[DecompositionPoint] = []
        self._at: dict[int, int] = {}
        self._made: dict[int, tf.Tensor] = {}

    def decompose(self) -> tuple[list[tf.Tensor], tuple[DecompositionPoint, ...]]:
        cut = {id(t) for t in self._targets}
        for t in self.again.values():
            operands = [i for i in _operands(t) or () if i.op.type != "Const"]
            if len(operands) > 1 or not _scales(t.op, operands[0]):
                cut.update(id(i) for i in operands if i.dtype.is_floating)
        needed = cut | {id(i) for t in self.again.values() for i in _operands(t) or ()}
        for t in self._order:
            if id(t) in needed or id(t) in self.again:
                self._make(t, id(t) in cut)
        return [self._made[id(t)] for t in self._targets], tuple(self._points)

    def _make(self, tensor: tf.Tensor, is_cut: bool) -> None:
        made = tensor
        if id(tensor) in self.again:
            made = _AGAIN[tensor.op.type](tensor.op, [self._made.get(id(i), i) for i in tensor.op.inputs])
        if is_cut:
            seed = tf.raw_ops.PlaceholderWithDefault(input=tf.ones([], tensor.dtype), shape=[], name=SEED_NAME)
            made = tf.raw_ops.PlaceholderWithDefault(
                input=tf.raw_ops.Mul(x=made, y=seed), shape=tensor.shape, name=VALUE_NAME
            )
            self._at[id(tensor)] = len(self._points)
            self._points.append(DecompositionPoint(tensor, seed, made, self._parts(tensor)))
        self._made[id(tensor)] = made

    def _parts(self, tensor: tf.Tensor) -> tuple[int, ...]:
        """Returns the nearest decomposition points below a tensor; none if one of its inputs has no point."""
        found: dict[int, None] = {}
        front = [tensor]
        while front:
            t = front.pop()
            if id(t) not in self.again:
                return ()
            for i in _operands(t) or ():
                if id(i) in self._at:
                    found[self._at[id(i)]] = None
                elif i.op.type != "Const":
                    front.append(i)
        return tuple(found)


def _in_order(targets: Sequence[tf.Tensor], is_end: Callable[[tf.Tensor], bool]) -> list[tf.Tensor]:
    """Returns the targets and their operands by arithmetic, operands first."""
    order: dict[int, tf.Tensor] = {}
    front = [(t, False) for t in targets]
    while front:
        tensor, is_entered = front.pop()
        if id(tensor) in order:
            continue
        operands = None if is_end(tensor) else _operands(tensor)
        if is_entered or operands is None:
            order[id(tensor)] = tensor
        else:
            front += [(tensor, True), *((i, False) for i in operands)]
    return list(order.values())


def _alike_everywhere(order: Sequence[tf.Tensor], is_end: Callable[[tf.Tensor], bool]) -> set[int]:
    """Returns the tensors computed from constants and variables only, which are not computed again."""
    found: set[int] = set()
    for t in order:
        operands = None if is_end(t) else _operands(t)
        if t.op.type in ("Const", "ReadVariableOp") or (operands and all(id(i) in found for i in operands)):
            found.add(id(t))
    return found


def _operands(tensor: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns the operands of a tensor's arithmetic; None if it is computed otherwise, or too large."""
    op = tensor.op
    if op.type not in _AGAIN or "_gradient_op_type" in op.node_def.attr or not _is_small(tensor):
        return None
    operands = list(op.inputs[: _DATA_INPUTS.get(op.type)])
    return operands if all(_is_small(i) and (i.dtype.is_floating or _is_condition(i)) for i in operands) else None


def _is_small(tensor: tf.Tensor) -> bool:
    shape = tensor.shape
    return bool(shape.is_fully_defined()) and int(shape.num_elements()) <= MOST_ELEMENTS


def _is_condition(tensor: tf.Tensor) -> bool:
    """Returns True for a comparison of floats, which counts as a float operand."""
    return tensor.dtype == tf.bool and tensor.op.type in having(Trait.COMPARISON | Trait.LOGIC)


def _scales(op: tf.Operation, operand: tf.Tensor) -> bool:
    """Returns True if an op's result, apart from constants, is reduced over replicas as its operand is."""
    if op.type in having(Trait.CASTS):
        return True
    at, apart = linear_operands(op.type, len(op.inputs)) or ((), False)
    return (apart or len(at) == 1) and any(op.inputs[k] is operand for k in at)


Again = Callable[[tf.Operation, Sequence[tf.Tensor]], tf.Tensor]


def _named(op_type: str, *names: str, attributes: Sequence[str] = ()) -> Again:
    """Returns a function that repeats an op with other inputs, by the names of these."""

    def again(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        attrs = {name: op.get_attr(name) for name in attributes}
        return getattr(tf.raw_ops, op_type)(**dict(zip(names, inputs, strict=True)), **attrs)

    return again


def _all(op_type: str, name: str, attributes: Sequence[str] = ()) -> Again:
    """Returns a function that repeats an op with another list of inputs."""

    def again(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        attrs = {name: op.get_attr(name) for name in attributes}
        return getattr(tf.raw_ops, op_type)(**{name: list(inputs)}, **attrs)

    return again


_UNARY = "Abs Exp Expm1 Log Log1p Neg Reciprocal Inv Rsqrt Sigmoid Sqrt Square Tanh"
_BINARY = "Add AddV2 Sub Mul MulNoNan RealDiv Div DivNoNan Maximum Minimum Pow SquaredDifference LogicalAnd LogicalOr"

_AGAIN: Mapping[str, Again] = {
    **{name: _named(name, "x") for name in _UNARY.split()},
    **{name: _named(name, "x", "y") for name in (*_BINARY.split(), *having(Trait.COMPARISON))},
    "LogicalNot": _named("LogicalNot", "x"),
    "Identity": _named("Identity", "input"),
    "Relu": _named("Relu", "features"),
    "Softplus": _named("Softplus", "features"),
    "Cast": _named("Cast", "x", attributes=["DstT", "Truncate"]),
    "Reshape": _named("Reshape", "tensor", "shape"),
    "Sum": _named("Sum", "input", "axis", attributes=["keep_dims"]),
    "Mean": _named("Mean", "input", "axis", attributes=["keep_dims"]),
    "SelectV2": _named("SelectV2", "condition", "t", "e"),
    "AddN": _all("AddN", "inputs"),
    "Pack": _all("Pack", "values", attributes=["axis"]),
}
"""By the type of an op, a function that repeats it with other inputs."""

_DATA_INPUTS: Mapping[str, int] = {"Reshape": 1, "Sum": 1, "Mean": 1}
"""Number of inputs that are operands, if others are a shape or axes."""
