"""Lookup tables that a step reads; a table whose content does not change is a constant of every worker."""

from __future__ import annotations

import functools
import gc
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import lookup_ops  # the base of all tables

from autodist.capture.graphs import bodies_of
from autodist.errors import CaptureError
from autodist.graph.editor import GraphDef, GraphEditor, NodeDef
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep

KINDS = having(Trait.TABLE)
"""Types of the ops of tables."""

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


def find_table(handle: Any) -> Table | None:
    """Returns the table of a captured handle; None if it is no table's, or of an unsupported kind."""
    for candidate in gc.get_objects():
        if isinstance(candidate, _READABLE) and candidate.resource_handle is handle:
            return Table.of(candidate)
    return None


def bind_table(editor: GraphEditor, captured: str, table: Table) -> None:
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
    found = next(_writes(graph_def), None)
    if found is not None:
        raise _changes(what, found.name, found.op)


def require_made_before(handle: tf.Tensor) -> None:
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


def fills_tables_alone(step: CapturedStep) -> bool:
    """Returns True if a run fills tables and touches no variable."""
    return not step.variables and next(_writes(step.graph_def), None) is not None


def _writes(graph_def: GraphDef) -> Iterator[NodeDef]:
    return (node for nodes in bodies_of(graph_def) for node in nodes if node.op in _WRITES)


def share_tables(step: CapturedStep, session: str) -> CapturedStep:
    """Makes all runs of a session use the same tables, which other sessions do not share.

    Args:
        session: a name that no other session has.
    """
    kept = [node.name for node in step.graph_index.having(Trait.TABLE)]
    if not kept:
        return step
    editor = GraphEditor(step.graph_def, step.graph_index)
    for name in kept:
        share(editor[name], session)
    return step.with_graph(editor.to_graph_def())


def share(node: NodeDef, session: str) -> str:
    """Gives a node's resource the same name in all runs of a session, and returns the name.

    Args:
        node: node of an iterator or a table, whose name may differ between runs.
        session: a name that no other session has.
    """
    shared = f"{session}/{node.attr['shared_name'].s.decode() or node.name}"
    node.attr["shared_name"].s = shared.encode()
    return shared
