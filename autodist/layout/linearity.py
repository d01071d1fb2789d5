"""Linearity: finds the tensors of a graph that are proportional to given ones, such as the seeds of its gradients."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist.graph.functions import branches_of
from autodist.graph.index import GraphIndex
from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.ops import Trait, having, linear_operands
from autodist.graph.walks import reach
from autodist.layout.bodies import Library
from autodist.layout.walk import GraphWalk

_CALLS, _BRANCHES, _LOOPS = map(having, (Trait.CALL, Trait.BRANCH, Trait.LOOP))
_BACK, _BY_SHAPES, _ZEROS = map(having, (Trait.BACK, Trait.BY_SHAPES, Trait.ZEROS))
_KEEP_ZEROS = having(Trait.CALL | Trait.BRANCH | Trait.LOOP | Trait.COPIES)
"""Ops without linear operands that may return zeros for zeros."""
_SMALL = 64
"""Larger constants are not tested for zeros, unless one stored value fills them."""


class Grade(enum.Enum):
    """Dependence of a tensor on the seeds."""

    ZERO = "always zero"
    FREE = "independent"
    LINEAR = "proportional"
    NONLINEAR = "nonlinear or unknown"


_DEPENDENT = (Grade.LINEAR, Grade.NONLINEAR)


def find_linearity(graph_index: GraphIndex, seeds: Collection[str], without: Collection[str] = ()) -> Linearity:
    """Computes the dependence of a graph's tensors on the seeds.

    Args:
        graph_index: of the graph.
        seeds: the seed tensors.
        without: nodes to ignore.
    """
    library = Library(graph_index.graph_def.library)
    return Linearity(graph_index, {tensor(s): Grade.LINEAR for s in seeds}, library, without)


def is_nonlinear(node: tf.compat.v1.NodeDef, grades: Sequence[Grade]) -> bool:
    """Returns True if an op is nonlinear in those of its inputs that depend on the seeds."""
    return _grade_by_table(node.op, [Grade.LINEAR if g is Grade.NONLINEAR else g for g in grades]) is Grade.NONLINEAR


class Linearity(GraphWalk[Grade]):
    """The grades of the tensors of a graph.

    Nodes that depend on the seeds are evaluated, and the nodes behind them that may make an input zero.

    Args:
        graph_index: of the graph.
        known: the grades of the seeds, or of a function's arguments.
        library: the functions of the graph.
        without: nodes to ignore.

    Attributes:
        nonlinear: the nonlinear nodes with proportional inputs.
        float16_nodes: the float16 nodes with proportional inputs.
    """

    def __init__(
        self,
        graph_index: GraphIndex,
        known: Mapping[str, Grade],
        library: Library,
        without: Collection[str] = (),
    ) -> None:
        super().__init__(graph_index.nodes, known)
        self._index, self._library = graph_index, library
        self._left_out = {*without, *self._known_nodes}
        self._called: dict[str, list[Linearity]] = {}
        self._dependent = self._readers_of(node_of(name) for name, grade in known.items() if grade in _DEPENDENT)
        self.nonlinear: set[str] = set()
        self.float16_nodes: set[str] = set()
        if self._dependent:
            names = [name for name in graph_index.order if name in self._dependent]
            self.follow(*names)
            for name in names:
                self._record(name)

    def of(self, name: str) -> Grade:
        name = tensor(name)
        is_evaluated = name in self._known or node_of(name) in self._facts
        return self._output(name) if is_evaluated else Grade.FREE

    def depends(self, name: str) -> bool:
        return self.of(name) in _DEPENDENT

    def _readers_of(self, roots: Iterable[str]) -> set[str]:
        """Returns the nodes that depend on some nodes by data."""

        def readers(name: str) -> list[str]:
            return [reader for reader in self._index.readers(name) if reader not in self._left_out]

        return reach([reader for root in roots for reader in readers(root)], readers)

    def _record(self, name: str) -> None:
        """Records a node with proportional inputs if it is nonlinear, or has float16 elements."""
        node = self._nodes[name]
        # A loop passes on a nonlinear value because of a node within the loop, which is to be recorded.
        grades_in = [Grade.LINEAR if self._is_passed_on(i) else self._output(i) for i in self._sources(node)]
        if Grade.LINEAR not in grades_in:
            return
        made, called = self._facts[name], self._called.get(name, ())
        becomes_nonlinear = Grade.NONLINEAR in (made if isinstance(made, list) else [made])
        if (becomes_nonlinear and Grade.NONLINEAR not in grades_in) or any(body.nonlinear for body in called):
            self.nonlinear.add(name)
        if _is_half(node) or any(body.float16_nodes for body in called):
            self.float16_nodes.add(name)

    def _is_passed_on(self, name: str) -> bool:
        """Returns True if a tensor is a dependent value of the previous iteration of a TensorFlow 1 loop."""
        return self._nodes[node_of(name)].op in _BACK and self.depends(name)

    # -- the walk --------------------------------------------------------------------------------------------------

    def _sources(self, node: tf.compat.v1.NodeDef) -> list[str]:
        if node.name in self._left_out:
            return []
        inputs = data_inputs(node)
        may_be_zero = node.op in _KEEP_ZEROS or linear_operands(node.op, len(inputs)) is not None
        return inputs if node.name in self._dependent or may_be_zero or self._library.has(node.op) else []

    def _assume(self, node: tf.compat.v1.NodeDef) -> Grade:
        return Grade.ZERO

    def _correct(self, node: tf.compat.v1.NodeDef, assumed: Grade, found: Grade) -> Grade:
        return _either([assumed, found])

    def _evaluate(self, node: tf.compat.v1.NodeDef, sources: list[str]) -> Grade | list[Grade]:
        grades_in = [self._output(source) for source in sources]
        self._called.pop(node.name, None)
        if node.op in _BY_SHAPES or node.name in self._left_out or _is_always_true(node, sources):
            return Grade.FREE
        if node.op in _ZEROS or _is_zero(node, grades_in):
            return Grade.ZERO
        if node.op == "IdentityN":
            return grades_in
        if node.op == "Cast":
            made = tf.as_dtype(node.attr["DstT"].type)
            return grades_in[0] if made.is_floating or made.is_complex else _unknown(grades_in)
        if node.op in _LOOPS:
            return self._loop(node, grades_in)
        if node.op in _BRANCHES:
            return self._branches(node, grades_in)
        if node.op in _CALLS:
            return self._call(node, node.attr["f"].func.name, grades_in)
        if self._library.has(node.op):
            return self._call(node, node.op, grades_in)
        return _grade_by_table(node.op, grades_in)

    # -- functions -------------------------------------------------------------------------------------------------

    def _call(self, node: tf.compat.v1.NodeDef, function: str, grades_in: Sequence[Grade]) -> list[Grade]:
        body = self._library.body(function, [tf.TensorShape(None)] * len(grades_in), [None] * len(grades_in))
        inner = Linearity(body.index, dict(zip(body.arguments, grades_in, strict=True)), self._library)
        self._called.setdefault(node.name, []).append(inner)
        return [inner.fact(name) for name in body.outputs]

    def _branches(self, node: tf.compat.v1.NodeDef, grades_in: Sequence[Grade]) -> Grade | list[Grade]:
        if grades_in[0] in _DEPENDENT:
            return Grade.NONLINEAR
        made = [self._call(node, name, grades_in[1:]) for name in branches_of(node)]
        return [_either(some) for some in zip(*made, strict=True)]

    def _loop(self, node: tf.compat.v1.NodeDef, grades_in: Sequence[Grade]) -> Grade | list[Grade]:
        state, before = list(grades_in), None
        body, condition = node.attr["body"].func.name, node.attr["cond"].func.name
        while state != before:
            self._called.pop(node.name, None)  # the last iteration counts
            before, after = state, self._call(node, body, state)
            state = [_either(pair) for pair in zip(state, after, strict=True)]
        if any(grade in _DEPENDENT for grade in self._call(node, condition, state)):
            return Grade.NONLINEAR
        return state


def _grade_by_table(op: str, grades_in: Sequence[Grade]) -> Grade:
    rule = linear_operands(op, len(grades_in))
    if rule is None:
        return _unknown(grades_in)
    at, separately = rule
    others = [grade for k, grade in enumerate(grades_in) if k not in at]
    if _unknown(others) is Grade.NONLINEAR:
        return Grade.NONLINEAR
    linear_grades = [grades_in[k] for k in at]
    if not separately:
        return _either(linear_grades)
    if Grade.ZERO in linear_grades:
        return Grade.ZERO
    if Grade.NONLINEAR in linear_grades or linear_grades.count(Grade.LINEAR) > 1:
        return Grade.NONLINEAR
    return Grade.LINEAR if Grade.LINEAR in linear_grades else Grade.FREE


def _unknown(grades_in: Iterable[Grade]) -> Grade:
    """Returns the grade of the outputs of an op without a linearity rule."""
    return Grade.NONLINEAR if any(grade in (Grade.LINEAR, Grade.NONLINEAR) for grade in grades_in) else Grade.FREE


def _either(grades: Iterable[Grade]) -> Grade:
    """Returns the grade of a sum, or of one of several values: zeros match all."""
    distinct = set(grades) - {Grade.ZERO}
    if not distinct:
        return Grade.ZERO
    return distinct.pop() if len(distinct) == 1 else Grade.NONLINEAR


def _is_always_true(node: tf.compat.v1.NodeDef, sources: Sequence[str]) -> bool:
    """Returns True for the comparison of a tensor without NaN with itself, as `tf.recompute_grad` orders passes."""
    if node.op != "Equal" or len(set(sources)) != 1:
        return False
    compared = tf.as_dtype(node.attr["T"].type)
    return not compared.is_floating and not compared.is_complex


def _is_zero(node: tf.compat.v1.NodeDef, grades_in: Sequence[Grade]) -> bool:
    if node.op == "Fill":
        return grades_in[1] is Grade.ZERO
    if node.op != "Const":
        return False
    value = node.attr["value"].tensor
    if not tf.as_dtype(value.dtype).is_floating and not tf.as_dtype(value.dtype).is_complex:
        return False
    if tf.TensorShape(value.tensor_shape).num_elements() == 0:
        return True
    stored = len(value.tensor_content) // tf.as_dtype(value.dtype).size
    return stored <= _SMALL and not np.any(tf.make_ndarray(value))


def _is_half(node: tf.compat.v1.NodeDef) -> bool:
    half = tf.float16.as_datatype_enum
    return any(value.type == half or half in value.list.type for value in node.attr.values())
