"""Lengths that a shape holds, exactly: not up to a factor that all replicas share, as the forms of `Dims` are."""

from __future__ import annotations

import itertools

import tensorflow as tf

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.facts import Form, Rows, form_of, rows_of
from autodist.graph.propagation.site import Scope, Site, tensor_name

Length = Rows | int | None
"""The rows that an axis has, as those of a first axis; or how long it is; or None where neither is known."""

_SAME_ELEMENTS = having(Trait.SAME | Trait.RESHAPES | Trait.CASTS)
_DEEPEST = 24


def length(site: Site, index: int, element: int = 0) -> Length:
    """What one element of an integer input of a node counts."""
    return _length(site.scope, site.inputs[index], element, _DEEPEST)


def is_length_of(site: Site, index: int, rows: Rows, element: int = 0) -> bool:
    """Whether one element of an integer input is the number of these rows."""
    found = length(site, index, element)
    return isinstance(found, Rows) and rows.per is not None and (found.count, found.per) == (rows.count, rows.per)


def _length(scope: Scope, tensor: str, element: int, depth: int) -> Length:
    value = scope.constant(tensor)
    if value is not None:
        return int(value.reshape(-1)[element]) if 0 <= element < value.size else None
    node = scope.producer(tensor)
    if node is None or depth == 0:
        return None
    sources = [tensor_name(name) for name in node.input if not name.startswith("^")]
    output = int(tensor.partition(":")[2] or 0)
    if node.op in having(Trait.LENGTHS):
        return _axis(scope, sources[output], element, node.op)
    if node.op == "StringSplitV2":
        return _axis(scope, sources[0], 0, "Shape") if (output, element) == (2, 0) else None
    if node.op == "SparseReshape":
        return _length(scope, sources[2], element, depth - 1)
    if node.op == "Unpack":
        return _length(scope, sources[0], output, depth - 1)
    if node.op in having(Trait.EXTREME):
        number = scope.shape(sources[0]).num_elements() or 0
        counted = {_length(scope, sources[0], k, depth - 1) for k in range(number)}
        return counted.pop() if len(counted) == 1 else None
    if node.op == "Mul":
        return _times(*(_length(scope, name, element if scope.shape(name).rank else 0, depth - 1) for name in sources))
    found = _source(scope, node, sources, element)
    return None if found is None else _length(scope, *found, depth - 1)


def _times(left: Length, right: Length) -> Length:
    """A number of rows some times."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    rows, number = (left, right) if isinstance(left, Rows) else (right, left)
    if isinstance(rows, Rows) and rows.per is not None and isinstance(number, int) and number > 0:
        return Rows(0, rows.count, rows.per * number)
    return None


def _axis(scope: Scope, tensor: str, axis: int, op: str) -> Length:
    shape, form = scope.shape(tensor), form_of(rows_of(scope.fact(tensor)))
    if shape.rank is None or axis >= shape.rank or (op == "Size" and shape.rank != 1):
        return None
    rows = form.rows if isinstance(form, Form) else None
    if rows is not None and rows.axis == axis:
        return Rows(0, rows.count, rows.per)
    is_same = rows is not None or (isinstance(form, Form) and form.is_same)
    return shape[axis] if is_same else None


def _source(scope: Scope, node: tf.compat.v1.NodeDef, sources: list[str], element: int) -> tuple[str, int] | None:
    """The tensor, and the element of it, that an element of a node's output is."""
    if node.op in _SAME_ELEMENTS:
        return sources[0], element
    if node.op == "Pack":
        return (sources[element], 0) if all(scope.shape(name).rank == 0 for name in sources) else None
    if node.op == "ConcatV2":
        return _part(scope, sources[:-1], element)
    if node.op == "Prod":
        return (sources[0], 0) if scope.shape(sources[0]).num_elements() == 1 else None
    if node.op == "ReverseV2":
        number = scope.shape(sources[0]).num_elements()
        return (sources[0], number - 1 - element) if number is not None and element < number else None
    if node.op in having(Trait.SLICES):
        return _sliced(scope, node, sources, element)
    chosen = scope.constant(sources[1]) if node.op == "GatherV2" else None
    return None if chosen is None else (sources[0], int(chosen.reshape(-1)[element]))


def _part(scope: Scope, parts: list[str], element: int) -> tuple[str, int] | None:
    lengths = [scope.shape(name).num_elements() for name in parts]
    for name, size, start in zip(parts, lengths, itertools.accumulate((n or 0 for n in lengths), initial=0)):
        if size is None:
            return None
        if element < start + size:
            return name, element - start
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
