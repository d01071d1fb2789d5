"""Linearity: finds the tensors of a graph that are proportional to given ones, such as the seeds of its gradients."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, tensor
from autodist.graph.ops import Trait, having, linear_operands
from autodist.layout.bodies import Body, Library

_CALLS, _BRANCHES, _LOOPS = map(having, (Trait.CALL, Trait.BRANCH, Trait.LOOP))
_BY_SHAPES, _ZEROS = having(Trait.BY_SHAPES), having(Trait.ZEROS)
_SMALL = 64
"""Larger constants are not tested for zeros, unless one stored value fills them."""


class Grade(enum.Enum):
    """Dependence of a tensor on the seeds."""

    ZERO = "always zero"
    FREE = "independent"
    LINEAR = "proportional"
    NONLINEAR = "nonlinear or unknown"


@dataclass(frozen=True)
class Linearity:
    """Result of a walk over a graph.

    Attributes:
        grades: by tensor; tensors that are missing do not depend on the seeds.
        nonlinear: maps each nonlinear node with proportional inputs to these inputs, in the order of the graph.
        float16_nodes: the float16 nodes with proportional inputs.
    """

    grades: Mapping[str, Grade]
    nonlinear: Mapping[str, tuple[str, ...]]
    float16_nodes: frozenset[str]

    def of(self, name: str) -> Grade:
        return self.grades.get(tensor(name), Grade.FREE)

    def depends(self, name: str) -> bool:
        return self.of(name) in (Grade.LINEAR, Grade.NONLINEAR)


def find_linearity(graph_index: GraphIndex, seeds: Collection[str], without: Collection[str] = ()) -> Linearity:
    """Computes the dependence of a graph's tensors on the seeds.

    Args:
        graph_index: of the graph.
        seeds: the seed tensors.
        without: nodes to ignore.
    """
    walk = _Walk(Library(graph_index.graph_def.library))
    grades = walk.follow(graph_index, {tensor(s): Grade.LINEAR for s in seeds}, frozenset(without))
    return Linearity(grades, walk.nonlinear, frozenset(walk.float16_nodes))


def is_nonlinear(node: tf.compat.v1.NodeDef, grades: Sequence[Grade]) -> bool:
    """Returns True if an op is nonlinear in those of its inputs that depend on the seeds."""
    return _grade_by_table(node.op, [Grade.LINEAR if g is Grade.NONLINEAR else g for g in grades]) is Grade.NONLINEAR


@dataclass
class _Walk:
    library: Library
    nonlinear: dict[str, tuple[str, ...]] = field(default_factory=dict)
    float16_nodes: set[str] = field(default_factory=set)
    _quiet: int = 0
    _bodies: dict[str, tuple[Body, GraphIndex]] = field(default_factory=dict)

    def follow(
        self,
        graph_index: GraphIndex,
        known: Mapping[str, Grade],
        without: frozenset[str] = frozenset(),
        caller: str | None = None,
    ) -> dict[str, Grade]:
        """Returns the grades of all tensors of a graph; repeats until those of v1 loops no longer change.

        Args:
            graph_index: of the graph.
            known: grades of some tensors.
            without: nodes to ignore.
            caller: the node of the outermost graph that calls this one; None in that graph itself.
        """
        back = {f"{node.name}:0": Grade.ZERO for node in graph_index.having(Trait.BACK)}
        self._quiet += bool(back)
        while True:
            grades = self._pass(graph_index, {**known, **back}, without, caller)
            next_back = {n: _either([back[n], self._next_grade(graph_index, grades, n)]) for n in back}
            if next_back == back:
                break
            back = next_back
        if back:
            self._quiet -= 1
            grades = self._pass(graph_index, {**known, **back}, without, caller)
        return grades

    def _next_grade(self, graph_index: GraphIndex, grades: Mapping[str, Grade], name: str) -> Grade:
        source = graph_index.nodes[name.partition(":")[0]].input[0]
        return grades.get(tensor(source), Grade.FREE)

    def _pass(
        self,
        graph_index: GraphIndex,
        known: Mapping[str, Grade],
        without: frozenset[str],
        caller: str | None,
    ) -> dict[str, Grade]:
        grades: dict[str, Grade] = dict(known)
        for name in graph_index.order:
            if f"{name}:0" in known or name in without:
                continue
            node = graph_index.nodes[name]
            inputs = [tensor(i) for i in node.input if not is_control(i)]
            grades_in = [grades.get(i, Grade.FREE) for i in inputs]
            made = self._grades_of(node, grades_in, caller or name)
            carried = tuple(i for i, grade in zip(inputs, grades_in, strict=True) if grade is Grade.LINEAR)
            if carried and Grade.NONLINEAR in made and Grade.NONLINEAR not in grades_in:
                self._record_nonlinear(caller or name, carried if caller is None else ())
            if carried and not self._quiet and _is_half(node):
                self.float16_nodes.add(caller or name)
            for k, grade in enumerate(made):
                if grade is not Grade.FREE:
                    grades[f"{name}:{k}"] = grade
        return grades

    def _record_nonlinear(self, name: str, carried: tuple[str, ...]) -> None:
        if not self._quiet:
            self.nonlinear[name] = tuple(dict.fromkeys((*self.nonlinear.get(name, ()), *carried)))

    def _grades_of(self, node: tf.compat.v1.NodeDef, grades_in: Sequence[Grade], caller: str) -> list[Grade]:
        """Returns the grades of a node's outputs; the last applies to all further outputs."""
        count = _outputs_of(node)
        if node.op in _BY_SHAPES:
            return [Grade.FREE] * count
        if node.op in _ZEROS or _is_zero(node, grades_in):
            return [Grade.ZERO] * count
        if node.op == "IdentityN":
            return list(grades_in)
        if node.op == "Cast":
            made = tf.as_dtype(node.attr["DstT"].type)
            return [grades_in[0] if made.is_floating or made.is_complex else _unknown(grades_in)] * count
        if node.op in _LOOPS:
            return self._loop(node, grades_in, caller)
        if node.op in _BRANCHES:
            names = _branches_of(node)
            return self._branches(names, grades_in, caller)
        if node.op in _CALLS:
            return self._call(node.attr["f"].func.name, grades_in, caller)
        if self.library.has(node.op):
            return self._call(node.op, grades_in, caller)
        return [_grade_by_table(node.op, grades_in)] * count

    # -- functions -------------------------------------------------------------------------------------------------

    def _call(self, function: str, grades_in: Sequence[Grade], caller: str) -> list[Grade]:
        if not self.library.has(function):
            return [_unknown(grades_in)]
        body, graph_index = self._body(function, len(grades_in))
        grades = self.follow(graph_index, dict(zip(body.arguments, grades_in, strict=True)), caller=caller)
        return [grades.get(name, Grade.FREE) for name in body.outputs]

    def _body(self, function: str, arguments: int) -> tuple[Body, GraphIndex]:
        if function not in self._bodies:
            body = self.library.body(function, [tf.TensorShape(None)] * arguments, [None] * arguments)
            self._bodies[function] = body, GraphIndex(body.graph_def)
        return self._bodies[function]

    def _branches(self, names: Sequence[str], grades_in: Sequence[Grade], caller: str) -> list[Grade]:
        if grades_in[0] in (Grade.LINEAR, Grade.NONLINEAR):
            return [Grade.NONLINEAR] * self._count(names[0])
        made = [self._call(name, grades_in[1:], caller) for name in names]
        return [_either(some) for some in zip(*made, strict=True)]

    def _count(self, function: str) -> int:
        return len(self._body(function, 0)[0].outputs) if function in self._bodies else 1

    def _loop(self, node: tf.compat.v1.NodeDef, grades_in: Sequence[Grade], caller: str) -> list[Grade]:
        state = list(grades_in)
        body, condition = node.attr["body"].func.name, node.attr["cond"].func.name
        self._quiet += 1
        while True:
            after = self._call(body, state, caller)
            joined = [_either(pair) for pair in zip(state, after, strict=True)]
            if joined == state:
                break
            state = joined
        self._quiet -= 1
        self._call(body, state, caller)  # again, to record the nonlinear nodes
        if any(grade in (Grade.LINEAR, Grade.NONLINEAR) for grade in self._call(condition, state, caller)):
            return [Grade.NONLINEAR] * len(state)
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


def _branches_of(node: tf.compat.v1.NodeDef) -> list[str]:
    if "branches" in node.attr:
        return [branch.name for branch in node.attr["branches"].list.func]
    return [node.attr[name].func.name for name in ("then_branch", "else_branch")]


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


def _outputs_of(node: tf.compat.v1.NodeDef) -> int:
    """Returns the number of outputs of a node, or an upper bound."""
    return next((int(node.attr[name].i) for name in _NUMBERS if name in node.attr), 8)


_NUMBERS = ("num", "num_split", "num_partitions")
"""Attributes that hold the number of outputs of a node."""
