"""Resources that a function captures: variables, lookup tables, and those that a step cannot use.

A table whose content does not change is a constant of every worker.
"""

from __future__ import annotations

import functools
import gc
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import lookup_ops  # the base of all tables

from autodist.capture.assemble import FoundVariable
from autodist.capture.graphs import bodies_of
from autodist.errors import CaptureError
from autodist.graph.editor import GraphDef, GraphEditor, NodeDef
from autodist.graph.functions import called_by, functions_by_name
from autodist.graph.ops import Trait, having
from autodist.graph.origins import line_of
from autodist.graph.step import CapturedStep

_WRITES = having(Trait.TABLE_WRITE)

_READABLE = (lookup_ops.StaticHashTable, lookup_ops.MutableHashTable)
"""Tables with readable content; vocabulary tables contain one of them."""

_FIX = (
    "Create and fill the table before the training, or fill it between two steps; keep values that are learnt in a "
    "step in a tf.Variable."
)


@dataclass(frozen=True)
class Table:
    """The content of a table of the script when a step was captured.

    Attributes:
        keys: the sorted keys.
        values: the value of each key.
        can_change: True if the script may add entries.
        source: the script's object.
    """

    keys: np.ndarray
    values: np.ndarray
    can_change: bool
    source: Any

    @classmethod
    def of(cls, source: Any) -> Table:
        """Returns the content of a TensorFlow table."""
        keys, values = (tensor.numpy() for tensor in source.export())
        rows = keys.reshape(len(keys), -1)
        order = np.lexsort(rows.T[::-1])
        return cls(keys[order], values[order], not isinstance(source, lookup_ops.StaticHashTable), source)

    @functools.cached_property
    def name(self) -> str:
        """Name derived from the content, so that workers with different tables capture different steps."""
        digest = hashlib.sha256(str((self.can_change, self.source.key_dtype, self.source.value_dtype)).encode())
        for array in (self.keys, self.values):
            digest.update(repr(array.shape).encode())
            digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
        return f"lookup_table_{digest.hexdigest()[:16]}"

    @property
    def has_changed(self) -> bool:
        """True if the script has changed the table since."""
        return self.can_change and Table.of(self.source).name != self.name

    def node(self) -> NodeDef:
        """Returns the table's node for a graph."""
        with tf.Graph().as_default() as graph:
            self._make()
        (node,) = graph.as_graph_def().node
        return node

    def filling(self) -> CapturedStep:
        """Returns the CapturedStep that fills the table from its keys and values."""
        with tf.Graph().as_default() as graph:
            keys = tf.compat.v1.placeholder(self.source.key_dtype, self.keys.shape, "keys")
            values = tf.compat.v1.placeholder(self.source.value_dtype, self.values.shape, "values")
            filled = tf.raw_ops.LookupTableImportV2(table_handle=self._make(), keys=keys, values=values)
        inputs: dict[str, int | None] = {keys.name: None, values.name: None}
        return CapturedStep(graph.as_graph_def(), inputs=inputs, targets=(filled.name,))

    def _make(self) -> tf.Tensor:
        made: dict[str, Any] = {
            "key_dtype": self.source.key_dtype,
            "value_dtype": self.source.value_dtype,
            "shared_name": f"autodist/{self.name}",
            "name": self.name,
        }
        if not self.can_change:
            return tf.raw_ops.HashTableV2(**made)
        if self.values.ndim == 1 and self.keys.ndim == 1:
            return tf.raw_ops.MutableHashTableV2(**made)
        return tf.raw_ops.MutableHashTableOfTensorsV2(value_shape=self.values.shape[1:], **made)


def bind_captures(
    editor: GraphEditor, graph: tf.Graph
) -> tuple[list[FoundVariable[tf.Variable]], dict[str, tuple[Table, str]]]:
    """Binds the tensors that the step captures: handles of variables, values of tensors, and tables.

    Returns:
        The variables; and by node, the tables with the tensor of the graph that the node stands for.
    """
    known = {id(v.handle): v for v in graph.variables}
    found: list[FoundVariable[tf.Variable]] = []
    tables: dict[str, tuple[Table, str]] = {}
    for outer, inner in graph.captures:
        node = editor[inner.op.name]
        if inner.dtype == tf.resource:
            variable = known[id(outer)] if id(outer) in known else _find_variable(outer)
            if variable is not None:
                _become_handle(node, variable)
                found.append(FoundVariable(variable, node.name))
                continue
            table = _find_table(outer)
            if table is None:
                _require_made_before(inner)
                raise CaptureError(_of_this_process(inner))
            tables[table.name] = table, inner.name
            _bind_table(editor, node.name, table)
        else:
            _become_constant(node, outer)
    return found, tables


def _name_and_line(resource: tf.Tensor) -> str:
    """Returns the name of a resource, and the line of the script that uses it."""
    lines = (line_of(op) for op in resource.consumers())
    line = next(filter(None, lines), None)
    return resource.op.name if line is None else f"{resource.op.name}, in {line}"


def _users(resource: tf.Tensor) -> set[str]:
    """Returns the types of the ops that take a resource, in the graph and in its functions."""
    library = functions_by_name(resource.graph.as_graph_def().library)
    front = [op.node_def for op in resource.consumers()]
    users: set[str] = set()
    while front:
        node = front.pop()
        users.add(node.op)
        called = [library.pop(name, None) for name in called_by(node)]
        front += [inner for function in called if function is not None for inner in function.node_def]
    return users


def _of_this_process(resource: tf.Tensor) -> str:
    """Returns the error message for a resource that a step cannot use."""
    users = _users(resource)
    name = _name_and_line(resource)
    if any("Summary" in user for user in users):
        return (
            f"the step writes a summary ({name}), but its writer lives in this process and the "
            "step runs on all replicas. Return the value and write it after the step; with Keras, add it as a metric, "
            "which the TensorBoard callback shows."
        )
    if any("Iterator" in user for user in users):
        return (
            f"the step takes its batches from an iterator ({name}), which lives in this process alone. "
            "Pass the batches as arguments: `step(next(iterator))`, or `for batch in dataset: step(batch)`."
        )
    if any("Lookup" in user for user in users):
        return (
            f"the step uses a lookup table whose content cannot be read ({name}), such as a "
            "DenseHashTable, and which lives in this process alone. Use a tf.lookup.StaticHashTable or a "
            "tf.lookup.experimental.MutableHashTable, or apply it in the input pipeline (dataset.map)."
        )
    return (
        f"the step uses a resource that is not a variable ({name}, for {', '.join(sorted(users))}), "
        "which lives in this process alone. Move it into the input pipeline."
    )


def _find_variable(handle: Any) -> tf.Variable | None:
    """Finds a variable by its handle, if the step writes it without reading it."""
    for candidate in gc.get_objects():
        if isinstance(candidate, tf.Variable) and getattr(candidate, "handle", None) is handle:
            return candidate
    return None


def _become_handle(node: tf.compat.v1.NodeDef, variable: tf.Variable) -> None:
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].type = variable.dtype.base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
    node.attr["shared_name"].s = node.name.encode()


def _become_constant(node: tf.compat.v1.NodeDef, value: tf.Tensor) -> None:
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        raise CaptureError(
            f"the step uses {value.name}, a tensor of another graph. Pass it to the step as an argument."
        )
    node.op = "Const"
    node.attr.clear()
    node.attr["dtype"].type = value.dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value.numpy(), dtype=value.dtype))


def _find_table(handle: Any) -> Table | None:
    """Returns the table of a captured handle; None if it is no table's, or of an unsupported kind."""
    for candidate in gc.get_objects():
        if isinstance(candidate, _READABLE) and candidate.resource_handle is handle:
            return Table.of(candidate)
    return None


def _bind_table(editor: GraphEditor, captured: str, table: Table) -> None:
    """Replaces the node of a captured table by the table."""
    if table.name not in editor:
        editor.add(table.node())
    editor.rewire(f"{captured}:0", f"{table.name}:0")
    editor.remove([captured])


def require_unchanged(graph_def: GraphDef, what: str) -> None:
    """Checks that a graph changes no table.

    Raises:
        CaptureError: the graph changes a table.
    """
    found = find_table_write(graph_def)
    if found is not None:
        raise _changes(what, found.name, found.op)


def _require_made_before(handle: tf.Tensor) -> None:
    """Checks that a step does not fill a table whose handle it captures; a step that creates a table fills it.

    Raises:
        CaptureError: the step fills a table.
    """
    for op in handle.consumers():
        if op.type in _WRITES:
            raise _changes("the step", op.name, op.type)


def _changes(what: str, name: str, op: str) -> CaptureError:
    return CaptureError(
        f"{what} changes a lookup table ({name}, {op}). Every worker has its own table and trains on a part of "
        f"the batch, so that the tables would diverge. {_FIX}"
    )


def find_table_write(graph_def: GraphDef) -> NodeDef | None:
    """Returns a node of a graph, or of one of its functions, that changes a table; None if there is none."""
    return next((node for nodes in bodies_of(graph_def) for node in nodes if node.op in _WRITES), None)
