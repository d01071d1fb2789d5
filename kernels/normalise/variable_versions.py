"""Worth: the value that a variable has at some point of a branch, and arithmetic on such values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, node_of
from autodist.graph.ops import DIFFERENCE, SUM
from autodist.graph.parts import Variable
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import Template

_ADD = {SUM.assign: tf.math.add, DIFFERENCE.assign: tf.math.subtract}

_ADD_ROWS = {
    SUM.scatter: (tf.raw_ops.ResourceScatterAdd, tf.tensor_scatter_nd_add),
    DIFFERENCE.scatter: (tf.raw_ops.ResourceScatterSub, tf.tensor_scatter_nd_sub),
}
"""By op, how rows are added to a variable, and how to a tensor."""

WRITES = frozenset({"AssignVariableOp", *_ADD, *_ADD_ROWS})
"""The writes that `Arithmetic.written` knows."""


@dataclass(frozen=True)
class AddedRows:
    """Rows that an op of `_ADD_ROWS` adds to a variable."""

    op: str
    indices: str
    updates: str


@dataclass(frozen=True)
class VariableVersion:
    """What a variable is worth: a tensor, and rows that were added to it since."""

    value: str
    rows: tuple[AddedRows, ...] = ()


class Arithmetic:
    """Adds nodes to a graph that read and write variables, and compute what they are worth.

    Names are those under "autodist/" for what is added.

    Args:
        editor: of the step.
    """

    def __init__(self, editor: StepEditor) -> None:
        self._editor = editor
        self._templates: dict[object, Template] = {}
        self._wholes: dict[VariableVersion, str] = {}

    def read(self, name: str, variable: Variable, after: Iterable[str]) -> VariableVersion:
        """Reads a variable once the nodes `after` have run."""

        def build(handle: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)

        spec = tf.TensorSpec(variable.shape, variable.dtype)
        made = self._single(f"{name}/read", "read", build, [variable.handle], [tf.resource], spec)
        self._editor.add_control(node_of(made), after)
        return VariableVersion(made)

    def write(
        self, name: str, variable: Variable, before: VariableVersion, worth: VariableVersion, after: Iterable[str]
    ) -> list[str]:
        """Lets a variable that is worth `before` be worth something else; returns the writes, each after the last."""
        if worth.value == before.value:
            return self._write_rows(f"{name}/write", variable, worth.rows, after)
        node = NodeDef(name=f"autodist/{name}/write", op="AssignVariableOp")
        node.attr["dtype"].type = variable.dtype.as_datatype_enum
        node.input[:] = [variable.handle, as_input(self.whole(name, worth)), *dict.fromkeys(f"^{a}" for a in after)]
        return [self._editor.add(node)]

    def _write_rows(self, name: str, variable: Variable, added: Sequence[AddedRows], after: Iterable[str]) -> list[str]:
        with self._editor.subgraph(name) as f:
            handle, last = f.input(variable.handle, tf.resource), f.after(after)
            writes = []
            for rows in added:
                add, _ = _ADD_ROWS[rows.op]
                indices, updates = f.input(rows.indices), f.input(rows.updates)
                with tf.control_dependencies([last]):
                    last = add(resource=handle, indices=indices, updates=updates)
                writes.append(last)
        return [f.name(write) for write in writes]

    def written(self, name: str, op: str, before: VariableVersion, inputs: Sequence[str]) -> VariableVersion:
        """What a variable is worth after a write of `WRITES`, whose inputs beside the variable are given."""
        if op in _ADD_ROWS:
            indices, updates = inputs
            return replace(before, rows=(*before.rows, AddedRows(op, indices, updates)))
        [new] = inputs
        if op == "AssignVariableOp":
            return VariableVersion(new)
        value = self.whole(name, before)
        spec = self._editor.spec(value)
        return VariableVersion(self._single(name, op, _ADD[op], [value, new], [spec.dtype] * 2, spec))

    def whole(self, name: str, worth: VariableVersion) -> str:
        """The tensor that holds what a variable is worth, rows and all."""
        if not worth.rows:
            return worth.value
        if worth not in self._wholes:
            with self._editor.subgraph(f"{name}/whole") as f:
                value = f.input(worth.value)
                for rows in worth.rows:
                    indices, updates = f.input(rows.indices), f.input(rows.updates)
                    value = _ADD_ROWS[rows.op][1](value, indices[..., tf.newaxis], updates)
                self._wholes[worth] = f.name(value)
        return self._wholes[worth]

    def gathered(self, name: str, worth: VariableVersion, indices: str) -> str:
        """Some rows of what a variable is worth."""
        whole = self.whole(name, worth)
        with self._editor.subgraph(name) as f:
            rows = tf.gather(f.input(whole), f.input(indices))
        return f.name(rows)

    def either(self, name: str, predicate: str, then: VariableVersion, other: VariableVersion) -> VariableVersion:
        """What a variable is worth that has one worth after one branch and another after the other.

        Rows stay rows where the branches add nothing else; those of the branch that is not taken are zeros.
        """
        if then.value != other.value:
            ends = (self.whole(f"{name}/{end}", worth) for end, worth in (("then", then), ("else", other)))
            return VariableVersion(self.select(name, predicate, *ends))
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(then.rows, other.rows, strict=False)))
        kept = [
            *(self._rows_if(f"{name}/then_{k}", predicate, r, True) for k, r in enumerate(then.rows[shared:])),
            *(self._rows_if(f"{name}/else_{k}", predicate, r, False) for k, r in enumerate(other.rows[shared:])),
        ]
        return replace(then, rows=(*then.rows[:shared], *kept))

    def select(self, name: str, predicate: str, then: str, other: str) -> str:
        """One tensor or another of the same dtype."""
        if then == other:
            return then
        shapes = self._editor.spec(then).shape, self._editor.spec(other).shape
        is_alike = shapes[0].is_fully_defined() and shapes[0] == shapes[1]
        if not is_alike or self._editor.spec(then).dtype == tf.variant:
            return self._one_of(name, predicate, then, other)

        def build(condition: tf.Tensor, t: tf.Tensor, e: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.SelectV2(condition=condition, t=t, e=e)

        spec = self._editor.spec(then)
        return self._single(name, "select", build, [predicate, then, other], [tf.bool, spec.dtype, spec.dtype], spec)

    def _one_of(self, name: str, predicate: str, then: str, other: str) -> str:
        """One of two tensors whose shapes may differ, or which hold what is no number: an `If` that passes it on."""
        with self._editor.subgraph(name) as f:
            condition, values = f.input(predicate), [f.input(then), f.input(other)]
            chosen = tf.cond(condition, *(lambda value=value: tf.identity(value) for value in values))
            chosen = tf.identity(chosen)
        return f.name(chosen)

    def copy(self, name: str, node: NodeDef, inputs: Sequence[str], specs: Sequence[tf.TensorSpec]) -> list[str]:
        """Adds a node of a branch that has no effect; returns its outputs, which are as `specs` say."""
        made = f"autodist/{name}"
        self._editor.add_copy(node, made, map(as_input, inputs))
        outputs = [f"{made}:{k}" for k in range(len(specs))]
        self._editor.note(dict(zip(outputs, specs, strict=True)))
        return outputs

    def _rows_if(self, name: str, predicate: str, rows: AddedRows, wanted: bool) -> AddedRows:
        """The rows where the predicate is as wanted, else zeros in their place."""
        with self._editor.subgraph(f"{name}/rows") as f:
            updates, condition = f.input(rows.updates), f.input(predicate)
            nothing = tf.zeros([], updates.dtype)
            kept = tf.where(condition, updates, nothing) if wanted else tf.where(condition, nothing, updates)
        return replace(rows, updates=f.name(kept))

    def _single(
        self,
        name: str,
        what: str,
        build: Callable[..., tf.Tensor],
        inputs: Sequence[str],
        dtypes: Sequence[tf.DType],
        spec: tf.TensorSpec,
    ) -> str:
        """The tensor of a single op; there are many alike, which `what` and their dtypes tell from others."""
        key = (what, *dtypes, spec.dtype)
        if key not in self._templates:
            self._templates[key] = Template(dtypes, lambda *given: [build(*given)])
        [made] = self._templates[key].splice(self._editor, name, inputs)
        self._editor.note({made: spec})
        return made
