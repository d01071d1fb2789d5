"""Lookup tables that a step reads: one whose content does not change is a constant of every worker."""

from __future__ import annotations

import functools
import gc
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import lookup_ops  # the base of all tables

from autodist.errors import CaptureError
from autodist.graph.editor import GraphDef, GraphEditor, NodeDef
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step

KINDS = having(Trait.TABLE)
"""The ops of a graph that stand for a table."""

_WRITES = having(Trait.TABLE_WRITE)

_FOLLOWED = (lookup_ops.StaticHashTable, lookup_ops.MutableHashTable)
"""The tables whose content is known; those of vocabularies have one of them inside."""

_MEND = (
    "Make and fill the table before the training, or fill it between two steps; what is to be learnt in a "
    "step belongs into a tf.Variable."
)


@dataclass(frozen=True)
class Table:
    """The content of a table of the script, as it was when a step was captured.

    Attributes:
        keys: sorted.
        values: of each key.
        can_change: whether the script may fill it further.
        source: the script's object.
    """

    keys: np.ndarray
    values: np.ndarray
    can_change: bool
    source: Any

    @classmethod
    def of(cls, source: Any) -> Table:
        """The content of a table of TensorFlow."""
        keys, values = (tensor.numpy() for tensor in source.export())
        rows = keys.reshape(len(keys), -1)
        order = np.lexsort(rows.T[::-1])
        return cls(keys[order], values[order], not isinstance(source, lookup_ops.StaticHashTable), source)

    @functools.cached_property
    def name(self) -> str:
        """By what it holds, so that workers whose tables differ capture steps that do."""
        digest = hashlib.sha256(str((self.can_change, self.source.key_dtype, self.source.value_dtype)).encode())
        for array in (self.keys, self.values):
            digest.update(repr(array.shape).encode())
            digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
        return f"lookup_table_{digest.hexdigest()[:16]}"

    @property
    def has_changed(self) -> bool:
        """Whether the script has filled it otherwise since."""
        return self.can_change and Table.of(self.source).name != self.name

    def node(self) -> NodeDef:
        """What stands for it in a graph."""
        with tf.Graph().as_default() as graph:
            self._make()
        (node,) = graph.as_graph_def().node
        return node

    def filling(self) -> Step:
        """A run that makes it, of its keys and its values."""
        with tf.Graph().as_default() as graph:
            keys = tf.compat.v1.placeholder(self.source.key_dtype, self.keys.shape, "keys")
            values = tf.compat.v1.placeholder(self.source.value_dtype, self.values.shape, "values")
            filled = tf.raw_ops.LookupTableImportV2(table_handle=self._make(), keys=keys, values=values)
        inputs: dict[str, int | None] = {keys.name: None, values.name: None}
        return Step(graph.as_graph_def(), inputs=inputs, targets=(filled.name,))

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
    """The table of a handle that a step has captured; None if it is no table's, or of a kind that is not known."""
    for candidate in gc.get_objects():
        if isinstance(candidate, _FOLLOWED) and candidate.resource_handle is handle:
            return Table.of(candidate)
    return None


def bind_table(editor: GraphEditor, captured: str, table: Table) -> None:
    """A table takes the place of the node by which the step has captured it."""
    if table.name not in editor:
        editor.add(table.node())
    editor.rewire(f"{captured}:0", f"{table.name}:0")
    editor.remove([captured])


def require_unchanged(graph_def: GraphDef, what: str) -> None:
    """Passes if a graph changes no table.

    Raises:
        CaptureError: it does.
    """
    found = next(_writes(graph_def), None)
    if found is not None:
        raise _changes(what, found.name, found.op)


def require_made_before(handle: tf.Tensor) -> None:
    """Passes unless a step that has captured a table's handle fills the table, as one does that makes it itself.

    Raises:
        CaptureError: it does.
    """
    for op in handle.consumers():
        if op.type in _WRITES:
            raise _changes("the step", op.name, op.type)


def _changes(what: str, name: str, op: str) -> CaptureError:
    return CaptureError(
        f"{what} changes a lookup table ({name}, {op}). Every worker has a table of its own and trains on a part of "
        f"the batch, so that the tables would no longer be alike. {_MEND}"
    )


def fills_tables_alone(item: Step) -> bool:
    """Whether a run fills tables and touches no variable."""
    return not item.variables and next(_writes(item.graph_def), None) is not None


def _writes(graph_def: GraphDef) -> Iterator[NodeDef]:
    every: Iterable[Any] = (graph_def.node, *(function.node_def for function in graph_def.library.function))
    return (node for nodes in every for node in nodes if node.op in _WRITES)


def share_tables(item: Step, session: str) -> Step:
    """All runs of a session find one table; those of other sessions are others.

    Args:
        session: a name that no other session has.
    """
    kept = [node.name for node in item.graph_index.having(Trait.TABLE)]
    if not kept:
        return item
    editor = GraphEditor(item.graph_def, item.graph_index)
    for name in kept:
        share(editor[name], session)
    return item.with_graph(editor.to_graph_def())


def share(node: NodeDef, session: str) -> str:
    """Gives the resource that a node makes one name in all runs of a session; returns it.

    Args:
        node: of an iterator or a table, whose name may differ from run to run.
        session: a name that no other session has.
    """
    shared = f"{session}/{node.attr['shared_name'].s.decode() or node.name}"
    node.attr["shared_name"].s = shared.encode()
    return shared
