"""Variable versions (SSA values): the value of a variable at a point of a branch, and arithmetic on such values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, node_of
from autodist.graph.ops import DIFFERENCE, SUM
from autodist.graph.parts import Variable
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import Template

_ADD = {SUM.assign: tf.math.add, DIFFERENCE.assign: tf.math.subtract}

_ADD_ROWS = {
    SUM.scatter: (tf.raw_ops.ResourceScatterAdd, tf.tensor_scatter_nd_add),
    DIFFERENCE.scatter: (tf.raw_ops.ResourceScatterSub, tf.tensor_scatter_nd_sub),
}
"""By op: the function that adds rows to a variable, and the one that adds rows to a tensor."""

WRITES = frozenset({"AssignVariableOp", *_ADD, *_ADD_ROWS})
"""The writes that `Arithmetic.written` supports."""


@dataclass(frozen=True)
class AddedRows:
    """Rows that an op of `_ADD_ROWS` adds to a variable."""

    op: str
    indices: str
    updates: str


@dataclass(frozen=True)
class VariableVersion:
    """The value of a variable: a tensor, and rows that were added to it since."""

    value: str
    rows: tuple[AddedRows, ...] = ()


class Arithmetic:
    """Adds nodes that read and write variables and compute their versions.

    Names of added nodes are relative to "autodist/".
    """

    def __init__(self, editor: StepEditor[Step]) -> None:
        self._editor = editor
        self._templates: dict[object, Template] = {}
        self._wholes: dict[VariableVersion, str] = {}

    def read(self, name: str, variable: Variable, after: Iterable[str]) -> VariableVersion:
        """Reads a variable after the nodes `after` have run."""

        def build(handle: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)

        spec = tf.TensorSpec(variable.shape, variable.dtype)
        made = self._single(f"{name}/read", "read", build, [variable.handle], [tf.resource], spec)
        self._editor.add_control(node_of(made), after)
        return VariableVersion(made)

    def write(
        self, name: str, variable: Variable, before: VariableVersion, version: VariableVersion, after: Iterable[str]
    ) -> list[str]:
        """Writes a new version of a variable over the version `before`; returns the writes, each after the last."""
        if version.value == before.value:
            return self._write_rows(f"{name}/write", variable, version.rows, after)
        inputs = [variable.handle, as_input(self.whole(name, version)), *dict.fromkeys(f"^{a}" for a in after)]
        return [self._editor.add_op("AssignVariableOp", f"autodist/{name}/write", inputs, variable.dtype)]

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
        """Returns the version of a variable after a write of `WRITES`; `inputs` are those besides the variable."""
        if op in _ADD_ROWS:
            indices, updates = inputs
            return replace(before, rows=(*before.rows, AddedRows(op, indices, updates)))
        [new] = inputs
        if op == "AssignVariableOp":
            return VariableVersion(new)
        value = self.whole(name, before)
        spec = self._editor.spec(value)
        return VariableVersion(self._single(name, op, _ADD[op], [value, new], [spec.dtype] * 2, spec))

    def whole(self, name: str, version: VariableVersion) -> str:
        """Returns the tensor that holds the full value of a version, added rows included."""
        if not version.rows:
            return version.value
        if version not in self._wholes:
            with self._editor.subgraph(f"{name}/whole") as f:
                value = f.input(version.value)
                for rows in version.rows:
                    indices, updates = f.input(rows.indices), f.input(rows.updates)
                    value = _ADD_ROWS[rows.op][1](value, indices[..., tf.newaxis], updates)
                self._wholes[version] = f.name(value)
        return self._wholes[version]

    def gathered(self, name: str, version: VariableVersion, indices: str) -> str:
        """Gathers rows of a version."""
        whole = self.whole(name, version)
        with self._editor.subgraph(name) as f:
            rows = tf.gather(f.input(whole), f.input(indices))
        return f.name(rows)

    def either(self, name: str, predicate: str, then: VariableVersion, other: VariableVersion) -> VariableVersion:
        """Merges the versions of a variable after the two branches of a conditional.

        Rows stay rows if the branches only add rows; those of the branch that is not taken become zeros.
        """
        if then.value != other.value:
            ends = (self.whole(f"{name}/{end}", version) for end, version in (("then", then), ("else", other)))
            return VariableVersion(self.select(name, predicate, *ends))
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(then.rows, other.rows, strict=False)))
        added = [
            *(self._rows_if(f"{name}/then_{k}", predicate, r, True) for k, r in enumerate(then.rows[shared:])),
            *(self._rows_if(f"{name}/else_{k}", predicate, r, False) for k, r in enumerate(other.rows[shared:])),
        ]
        return replace(then, rows=(*then.rows[:shared], *added))

    def select(self, name: str, predicate: str, then: str, other: str) -> str:
        """Selects one of two tensors of the same dtype."""
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
        """Selects one of two tensors of different shapes or non-numeric dtype by an `If` that forwards it."""
        with self._editor.subgraph(name) as f:
            condition, values = f.input(predicate), [f.input(then), f.input(other)]
            chosen = tf.cond(condition, *(lambda value=value: tf.identity(value) for value in values))
            chosen = tf.identity(chosen)
        return f.name(chosen)

    def copy(self, name: str, node: NodeDef, inputs: Sequence[str], specs: Sequence[tf.TensorSpec]) -> list[str]:
        """Copies a stateless node of a branch; returns its outputs, whose specs are `specs`."""
        made = f"autodist/{name}"
        self._editor.add_copy(node, made, map(as_input, inputs))
        outputs = [f"{made}:{k}" for k in range(len(specs))]
        self._editor.note(dict(zip(outputs, specs, strict=True)))
        return outputs

    def _rows_if(self, name: str, predicate: str, rows: AddedRows, wanted: bool) -> AddedRows:
        """Returns the rows if the predicate equals `wanted`, else zeros."""
        with self._editor.subgraph(f"{name}/rows") as f:
            updates, condition = f.input(rows.updates), f.input(predicate)
            zero = tf.zeros([], updates.dtype)
            selected = tf.where(condition, updates, zero) if wanted else tf.where(condition, zero, updates)
        return replace(rows, updates=f.name(selected))

    def _single(
        self,
        name: str,
        what: str,
        build: Callable[..., tf.Tensor],
        inputs: Sequence[str],
        dtypes: Sequence[tf.DType],
        spec: tf.TensorSpec,
    ) -> str:
        """Adds a single op; returns its output. Ops with equal `what` and dtypes share a template."""
        key = (what, *dtypes, spec.dtype)
        if key not in self._templates:
            self._templates[key] = Template(dtypes, lambda *inputs: [build(*inputs)])
        [made] = self._templates[key].splice(self._editor, name, inputs)
        self._editor.note({made: spec})
        return made
