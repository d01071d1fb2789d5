"""Factor rules of the nodes of a step: those of the op table, with rules for shapes and variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the only API that returns the definition of an op

from autodist.graph.effects import READS, Effects
from autodist.graph.names import data_inputs, node_of, output_index, tensor
from autodist.graph.op_types import types_of_outputs
from autodist.graph.ops import Factor, FactorRule, OpView, factor_rule, writes_rows
from autodist.graph.static_shapes import StaticShapes, is_open
from autodist.graph.step import CapturedStep

Lengths = tuple[int | None, ...]

ROW = "row"
"""The factor of the rows of a table that an op looks up or adds to: a place has some of the rows."""

ADDS_ROWS = ("ResourceScatterAdd", "ResourceScatterSub")
"""Ops that add rows to those of a variable."""

_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")

_APPLIES = "ResourceApply"
"""Prefix of the training ops of TensorFlow 1 optimizers, such as ResourceApplyAdam."""


@dataclass(frozen=True)
class Side:
    """A tensor or variable that a node reads, writes or returns.

    Attributes:
        key: the name of the tensor, or of the handle of the variable.
        lengths: of its dimensions.
        factors: of each dimension; None for a dimension that the node needs whole.
    """

    key: str
    lengths: Lengths
    factors: tuple[Factor | None, ...]


@dataclass(frozen=True)
class NodeRule:
    """The factors of one node.

    Attributes:
        node: the node.
        operands: by position; None for an operand of unknown rank.
        results: by position; None for a result of unknown rank.
        rule: the factor rule; None if the node needs its operands whole.
    """

    node: tf.compat.v1.NodeDef
    operands: tuple[Side | None, ...]
    results: tuple[Side | None, ...]
    rule: FactorRule | None

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(side for side in (*self.operands, *self.results) if side is not None)


class Rules:
    """The rules of a step's nodes, each computed once.

    Args:
        step: the step; its shapes are those of one device.

    Attributes:
        static: the shapes.
    """

    def __init__(self, step: CapturedStep) -> None:
        self._step = step
        self._nodes = step.graph_index.nodes
        self._effects = Effects(step.graph_def, self._nodes)
        self.static = StaticShapes(step)
        self._rules: dict[str, NodeRule] = {}

    def shape(self, name: str) -> tf.TensorShape:
        """Returns the static shape of a tensor, as `StaticShapes` does; that of the variable for a handle."""
        variable = self.variable(name)
        return tf.TensorShape(variable) if variable is not None else self.static.shape(name)

    def variable(self, name: str) -> Lengths | None:
        """Returns the lengths of the variable whose handle a tensor is; None for other tensors."""
        key = self.key(name)
        return self._step.by_handle[key].shape if key in self._step.by_handle else None

    def key(self, name: str) -> str:
        """Returns the key of a tensor: its name, or the handle of the variable that it refers to."""
        handle = self._effects.handle_of(name) or ""
        return handle if handle in self._step.by_handle else tensor(name)

    def constant(self, name: str) -> np.ndarray | None:
        """Returns the value of a tensor that is computed from constants and shapes only."""
        return self.static.constant(name)

    def node(self, name: str) -> tf.compat.v1.NodeDef:
        """Returns the node of a tensor."""
        return self._nodes[node_of(name)]

    def of(self, name: str) -> NodeRule:
        """Returns the rule of a node."""
        if name not in self._rules:
            self._rules[name] = self._find(self._nodes[name])
        return self._rules[name]

    def _find(self, node: tf.compat.v1.NodeDef) -> NodeRule:
        inputs = data_inputs(node)
        outputs = self._outputs(node)
        rule = None if None in map(self._rank, [*inputs, *outputs]) else _rule(_View(node, inputs, self))
        factors = [None] * len(inputs) if rule is None else rule.operands
        operands = tuple(self._side(name, axes) for name, axes in zip(inputs, factors, strict=True))
        last = [] if rule is None else rule.results
        axes_of = [None if not last else last[min(k, len(last) - 1)] for k in range(len(outputs))]
        results = tuple(self._side(name, axes) for name, axes in zip(outputs, axes_of, strict=True))
        return NodeRule(node, operands, results, rule)

    def _outputs(self, node: tf.compat.v1.NodeDef) -> list[str]:
        if op_def_registry.get(node.op) is None:  # a call of a library function
            return []
        return [f"{node.name}:{k}" for k, _ in enumerate(types_of_outputs(node))]

    def _rank(self, name: str) -> int | None:
        return self.shape(name).rank

    def _side(self, name: str, axes: Sequence[Factor | None] | None) -> Side | None:
        shape = self.shape(name)
        if shape.rank is None:
            return None
        lengths = tuple(None if is_open(n) else n for n in shape.as_list())
        known = (*(axes or ()), *[None] * len(lengths))[: len(lengths)]
        # A dimension of length 1 that is repeated belongs to no factor.
        return Side(self.key(name), lengths, tuple(f if n != 1 else None for f, n in zip(known, lengths, strict=True)))


@dataclass(frozen=True)
class _View(OpView):
    node: tf.compat.v1.NodeDef
    inputs: list[str]
    rules: Rules

    def shape(self, index: int) -> tf.TensorShape:
        return self.rules.shape(self.inputs[index])

    def output_shape(self) -> tf.TensorShape:
        return self.rules.shape(f"{self.node.name}:0")

    def constant(self, index: int) -> np.ndarray | None:
        return self.rules.constant(self.inputs[index])

    def axes_listed(self, index: int, of: int) -> set[int] | None:
        """Returns the axes that operand `index` lists, also if they follow from shapes with unknown lengths."""
        name = self.inputs[index]
        source = self.rules.node(name)
        if source.op == "BroadcastGradientArgs":
            found = self.rules.static.broadcast_axes(source)
            return None if found is None else found[output_index(name)]
        return super().axes_listed(index, of)


def _rule(op: _View) -> FactorRule | None:
    if op.node.op in READS or op.node.op in _WRITES:
        return _of_variable(op)
    if op.node.op.startswith(_APPLIES):
        return _of_training(op)
    if writes_rows(op.node.op):
        return _of_rows(op)
    if op.node.op in _OWN:
        return _OWN[op.node.op](op)
    return factor_rule(op)


def _of_variable(op: _View) -> FactorRule:
    """ReadVariableOp, ResourceGather and assignments: the first operand is the variable."""
    variable = tuple(range(op.rank(0) or 0))
    if op.node.op == "ReadVariableOp":
        return FactorRule((variable,), (variable,))
    if op.node.op in _WRITES:
        return FactorRule((variable, variable), ())
    if op.node.op == "ResourceGather" and not op.number("batch_dims"):
        indices = tuple(f"index{k}" for k in range(op.rank(1) or 0))
        row = ROW if _can_add(op, "dtype") else None
        return FactorRule(((row, *variable[1:]), indices), ((*indices, *variable[1:]),))
    return FactorRule((None,) * len(op.inputs), ((),))


def _of_training(op: _View) -> FactorRule:
    """ResourceApplyAdam and similar ops (variable, slots, gradient, numbers): elementwise in those with its rank."""
    variable = tuple(range(op.rank(0) or 0))
    return FactorRule(tuple(variable if op.rank(k) == len(variable) else None for k in range(len(op.inputs))), ())


def _of_rows(op: _View) -> FactorRule | None:
    """ResourceScatterAdd and similar ops (variable, indices, rows)."""
    if len(op.inputs) != 3 or op.rank(1) is None or op.rank(2) != (op.rank(0) or 0) - 1 + (op.rank(1) or 0):
        return None
    variable = tuple(range(op.rank(0) or 0))
    row = ROW if op.node.op in ADDS_ROWS else None
    return FactorRule(((row, *variable[1:]), None, (*[None] * (op.rank(1) or 0), *variable[1:])), ())


def _gather(op: _View) -> FactorRule | None:
    """GatherV2 (values, indices, axis) along the first axis: places that do not have a row return zeros."""
    rule = factor_rule(op)
    if rule is None or rule.operands[0] is None or op.number("batch_dims") or op.scalar(2) != 0:
        return rule
    if not _can_add(op, "Tparams"):
        return rule
    return replace(rule, operands=((ROW, *rule.operands[0][1:]), *rule.operands[1:]))


def _can_add(op: _View, attribute: str) -> bool:
    """Returns True if tensors of the type that an attribute names can be added."""
    return tf.as_dtype(op.node.attr[attribute].type) not in (tf.bool, tf.string, tf.variant, tf.resource)


def _reshape(op: _View) -> FactorRule | None:
    """Reshape (value, lengths): a group of dimensions that merge or split is divided along its major dimension."""
    before, after = op.shape(0).as_list(), op.output_shape().as_list()
    groups = _groups(before, after)
    if groups is None:
        return None
    left: list[Factor | None] = [None] * len(before)
    right: list[Factor | None] = [None] * len(after)
    for number, (first, last) in enumerate(groups):
        major = next((k for k in first if before[k] != 1), None)
        other = next((k for k in last if after[k] != 1), None)
        if major is not None and other is not None:
            left[major] = right[other] = number
    return FactorRule((tuple(left), None), (tuple(right),), lengths=(1,))


def _groups(before: list[int | None], after: list[int | None]) -> list[tuple[range, range]] | None:
    """Returns pairs of ranges of dimensions with equal products; None if the lengths do not determine them.

    At most one length on each side is unknown, and both stand for the same number of elements or for a multiple.
    """
    if before.count(None) > 1 or before.count(None) != after.count(None):
        return None
    start: list[tuple[range, range]] = []
    end: list[tuple[range, range]] = []
    i, j, p, q = 0, 0, len(before), len(after)
    while i < p and j < q and (group := _next_group(before[i:p], after[j:q])):
        start.append((range(i, i + group[0]), range(j, j + group[1])))
        i, j = i + group[0], j + group[1]
    while p > i and q > j and (group := _next_group(before[i:p][::-1], after[j:q][::-1])):
        end.append((range(p - group[0], p), range(q - group[1], q)))
        p, q = p - group[0], q - group[1]
    middle = [(range(i, p), range(j, q))] if i < p or j < q else []
    return [*start, *middle, *reversed(end)]


def _next_group(before: Sequence[int | None], after: Sequence[int | None]) -> tuple[int, int] | None:
    """Returns the numbers of dimensions of the shortest group at the start; None if an unknown length comes first."""
    if before[0] is None and after[0] is None:
        same = prod(n for n in before[1:] if n is not None) == prod(n for n in after[1:] if n is not None)
        return (1, 1) if same else None
    i = j = 1
    if before[0] is None or after[0] is None:
        return None
    left, right = before[0], after[0]
    while left != right:
        grow_left = left < right
        rest, at = (before, i) if grow_left else (after, j)
        if at >= len(rest) or (length := rest[at]) is None:
            return None
        left, right, i, j = (left * length, right, i + 1, j) if grow_left else (left, right * length, i, j + 1)
    return i, j


def _fill(op: _View) -> FactorRule | None:
    """Fill (lengths, value)."""
    return FactorRule((None, None), (tuple(range(op.output_shape().rank or 0)),), lengths=(0,))


def _identities(op: _View) -> FactorRule:
    """IdentityN: each result is the operand at its position."""
    sides = tuple(tuple(f"{k}.{axis}" for axis in range(op.rank(k) or 0)) for k in range(len(op.inputs)))
    return FactorRule(sides, sides)


def _squeeze(op: _View) -> FactorRule | None:
    """Squeeze: without a list, of all dimensions of length 1, if all lengths are known."""
    lengths = op.shape(0).as_list()
    if op.numbers("squeeze_dims") or any(n is None or is_open(n) for n in lengths):
        return factor_rule(op)
    kept = tuple(k for k, length in enumerate(lengths) if length != 1)
    return FactorRule((tuple(range(len(lengths))),), (kept,))


_OWN = {"Fill": _fill, "GatherV2": _gather, "IdentityN": _identities, "Reshape": _reshape, "Squeeze": _squeeze}
