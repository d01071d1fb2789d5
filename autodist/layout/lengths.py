"""Exact lengths in shapes; the forms of `Dims`, in contrast, hold up to a constant common to all replicas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import tensorflow as tf

from autodist.graph.names import data_inputs
from autodist.graph.ops import Trait, having
from autodist.layout.facts import Form, Sharded, form_of, rows_of
from autodist.layout.op_context import OpContext, Scope, tensor_name

Length = Sharded | int | None
"""The rows along an axis, as those of a first axis; or the length of the axis; or None if neither is known."""

_SAME_ELEMENTS = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS)
_MAX_DEPTH = 24


def length(ctx: OpContext, index: int, element: int = 0) -> Length:
    """Returns the length held by one element of an integer input, regardless of the order of the rows."""
    return _unordered(length_in_order(ctx, index, element))


def length_in_order(ctx: OpContext, index: int, element: int = 0) -> Length:
    """Returns the length held by one element of an integer input, with the order of the rows."""
    return _length(ctx.scope, ctx.inputs[index], element, _MAX_DEPTH)


def _unordered(measured: Length) -> Length:
    return replace(measured, order=()) if isinstance(measured, Sharded) else measured


def is_length_of(ctx: OpContext, index: int, rows: Sharded, element: int = 0) -> bool:
    """Returns True if one element of an integer input is the number of these rows."""
    return is_same_length(rows, length(ctx, index, element))


def _length(scope: Scope, tensor: str, element: int, depth: int) -> Length:
    value = scope.constant(tensor)
    if value is not None:
        return int(value.reshape(-1)[element]) if 0 <= element < value.size else None
    node = scope.producer(tensor)
    if node is None or depth == 0:
        return None
    sources = data_inputs(node)
    output = int(tensor.partition(":")[2] or 0)
    if node.op in having(Trait.LENGTHS):
        return _axis(scope, sources[output], element, node.op)
    if node.op == "StringSplitV2" or (node.op.startswith("SparseCross") and not node.attr["N"].i):
        return _axis(scope, sources[0], 0, "Shape") if (output, element) == (2, 0) else None
    if node.op == "SparseReshape":
        return _length(scope, sources[2], element, depth - 1)
    if node.op == "Unpack":
        return _length(scope, sources[0], output, depth - 1)
    if node.op in having(Trait.EXTREME):
        number = scope.shape(sources[0]).num_elements() or 0
        counted = {_unordered(_length(scope, sources[0], k, depth - 1)) for k in range(number)}
        return counted.pop() if len(counted) == 1 else None
    if node.op == "Mul":
        return _times(*_both(scope, sources, element, depth))
    if node.op in having(Trait.WHOLE_QUOTIENT):
        return whole_quotient(*_both(scope, sources, element, depth))
    if node.op == "AddV2":
        return plus(*_both(scope, sources, element, depth))
    if node.op == "Sub":
        return _minus(*_both(scope, sources, element, depth))
    if node.op == "ConcatOffset":
        axis = scope.constant(sources[0])
        return 0 if axis is not None and 0 <= int(axis) != element else None
    result = _source(scope, node, sources, element)
    return None if result is None else _length(scope, *result, depth - 1)


def _both(scope: Scope, sources: list[str], element: int, depth: int) -> tuple[Length, Length]:
    """Returns the lengths of two operands; one may be a scalar and the other a vector."""
    left, right = (_length(scope, name, element if scope.shape(name).rank else 0, depth - 1) for name in sources)
    return left, right


def _times(left: Length, right: Length) -> Length:
    """Returns a number of rows times an integer."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    rows, number = (left, right) if isinstance(left, Sharded) else (right, left)
    if isinstance(rows, Sharded) and rows.per is not None and isinstance(number, int) and number > 0:
        return Sharded(0, rows.count, rows.per * number)
    return None


def whole_quotient(left: Length, right: Length) -> int | None:
    """Returns the quotient of two lengths if it is replicated and whole, else None."""
    if (
        isinstance(left, Sharded)
        and isinstance(right, Sharded)
        and left.count == right.count
        and left.per
        and right.per
    ):
        quotient = left.per / right.per
    elif isinstance(left, int) and isinstance(right, int) and right:
        quotient = Fraction(left, right)
    else:
        return None
    return int(quotient) if quotient.denominator == 1 else None


def is_same_length(left: Length, right: Length) -> bool:
    """Returns True if two lengths are known to be equal on every replica."""
    if isinstance(left, Sharded) and isinstance(right, Sharded):
        return left.per is not None and (left.count, left.per) == (right.count, right.per)
    return isinstance(left, int) and left == right


def plus(left: Length, right: Length) -> Length:
    """Returns the sum of two lengths."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if isinstance(left, Sharded) and isinstance(right, Sharded):
        if left.count != right.count or left.per is None or right.per is None:
            return None
        return Sharded(0, left.count, left.per + right.per)
    return left if right == 0 else right if left == 0 else None


def _minus(left: Length, right: Length) -> Length:
    """Returns the difference of two lengths."""
    if isinstance(left, int) and isinstance(right, int):
        return left - right
    if is_same_length(left, right):
        return 0
    if isinstance(left, Sharded) and isinstance(right, Sharded) and left.count == right.count:
        per = left.per - right.per if left.per is not None and right.per is not None else Fraction(0)
        return Sharded(0, left.count, per) if per > 0 else None
    return left if right == 0 else None


def _axis(scope: Scope, tensor: str, axis: int, op: str) -> Length:
    shape, form = scope.shape(tensor), form_of(rows_of(scope.fact(tensor)))
    if shape.rank is None:
        return None
    rows = form.rows if isinstance(form, Form) else None
    if op == "Size" and shape.rank != 1:
        others = [n for k, n in enumerate(shape) if rows is None or k != rows.axis]
        number = None if None in others else math.prod(others)
        return None if rows is None or number is None else _times(Sharded(0, rows.count, rows.per), number)
    if axis >= shape.rank:
        return None
    if rows is not None and rows.axis == axis:
        return Sharded(0, rows.count, rows.per, rows.order)
    is_replicated = rows is not None or (isinstance(form, Form) and form.is_replicated)
    return shape[axis] if is_replicated else None


def _source(scope: Scope, node: tf.compat.v1.NodeDef, sources: list[str], element: int) -> tuple[str, int] | None:
    """Returns the tensor and the element of it that an element of a node's output equals; None if unknown."""
    if node.op in _SAME_ELEMENTS:
        return sources[0], element
    if node.op == "Pack":
        return (sources[element], 0) if all(scope.shape(name).rank == 0 for name in sources) else None
    if node.op == "ConcatV2":
        return _concat_operand(scope, sources[:-1], element, scope.constant(sources[-1]))
    if node.op == "Prod":
        return (sources[0], 0) if scope.shape(sources[0]).num_elements() == 1 else None
    if node.op == "Minimum":
        return _absorbing(scope, sources, element)
    if node.op == "ReverseV2":
        number = scope.shape(sources[0]).num_elements()
        return (sources[0], number - 1 - element) if number is not None and element < number else None
    if node.op in having(Trait.SLICES):
        return _sliced(scope, node, sources, element)
    chosen = scope.constant(sources[1]) if node.op == "GatherV2" else None
    return None if chosen is None else (sources[0], int(chosen.reshape(-1)[element]))


def _absorbing(scope: Scope, operands: list[str], element: int) -> tuple[str, int] | None:
    """Returns x for `minimum(x, maximum(x, …))`, which is always x."""
    for bound, other in (operands, operands[::-1]):
        maximum = scope.producer(other)
        if maximum is not None and maximum.op == "Maximum" and bound in map(tensor_name, maximum.input[:2]):
            return bound, element
    return None


def _concat_operand(scope: Scope, parts: list[str], element: int, axis: np.ndarray | None) -> tuple[str, int] | None:
    """Returns the operand of a concatenation that holds an element, and the element's index in it.

    Operands may be concatenated along the first or the second axis.
    """
    shapes = [scope.shape(name) for name in parts]
    if axis is None or any(shape.rank is None for shape in shapes):
        return None
    if int(axis) % (shapes[0].rank or 1) == 0:
        result = _locate([shape.num_elements() for shape in shapes], element)
        return None if result is None else (parts[result[0]], result[1])
    widths = [shape[1] for shape in shapes if shape.rank == 2 and shape[1] is not None]
    if len(widths) < len(parts) or not sum(widths):
        return None
    row, place = divmod(element, sum(widths))
    result = _locate(widths, place)
    return None if result is None else (parts[result[0]], row * widths[result[0]] + result[1])


def _locate(lengths: Sequence[int | None], element: int) -> tuple[int, int] | None:
    """Returns the number of the operand that holds an element, and the element's index in it."""
    starts = itertools.accumulate((length or 0 for length in lengths), initial=0)
    for part, (length, start) in enumerate(zip(lengths, starts)):
        if length is None:
            return None
        if element < start + length:
            return part, element - start
    return None


def _sliced(scope: Scope, node: tf.compat.v1.NodeDef, sources: list[str], element: int) -> tuple[str, int] | None:
    if scope.shape(sources[0]).rank == 0 and node.attr["new_axis_mask"].i == 1:
        return sources[0], 0
    first = scope.constant(sources[1])
    if first is None or first.size != 1 or scope.shape(sources[0]).rank != 1:
        return None
    begin, step = int(first.reshape(-1)[0]), 1
    if node.op == "StridedSlice":
        strides = scope.constant(sources[3])
        if strides is None or node.attr["new_axis_mask"].i or node.attr["ellipsis_mask"].i:
            return None
        begin, step = 0 if node.attr["begin_mask"].i else begin, int(strides.reshape(-1)[0])
    if begin < 0:
        number = scope.shape(sources[0])[0]
        begin = begin + number if number is not None else begin
    return (sources[0], begin + step * element) if begin >= 0 and step > 0 else None
