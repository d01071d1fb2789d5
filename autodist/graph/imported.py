"""Graphs that are imported unchanged, to run them or to infer shapes with TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session as c_api  # used by tf.import_graph_def
from tensorflow.python.framework import c_api_util  # as well


class ImportedGraph(tf.Graph):
    """A graph that imports others without creating a Python object for each of their operations.

    These objects are four fifths of the cost of `tf.import_graph_def`. Here an operation gets one on first use, by its
    name or as an input of another. Call `make_operations` before reading control inputs of an operation, consumers of a
    tensor or `get_operations`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[str, Any] = {}

    def import_nodes(self, graph_def: tf.compat.v1.GraphDef, prefix: str = "") -> None:
        """Adds nodes and functions unchanged, with their devices; scopes do not apply.

        Args:
            graph_def: the graph to import.
            prefix: added before the nodes' names, with a slash; "": names are unchanged.

        Raises:
            ValueError: TensorFlow does not accept the graph.
        """
        options = c_api_util.ScopedTFImportGraphDefOptions()
        c_api.TF_ImportGraphDefOptionsSetPrefix(options.options, prefix)
        text = c_api.TF_NewBufferFromString(graph_def.SerializeToString())
        try:
            with self._mutation_lock(), self._c_graph.get() as graph:
                c_api_util.ScopedTFImportGraphDefResults(
                    c_api.TF_GraphImportGraphDefWithResults(graph, text, options.options)
                )
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(str(error)) from error
        finally:
            c_api.TF_DeleteBuffer(text)
        self._pending.update((c_api.TF_OperationName(made), made) for made in self.new_operations())
        if self.version == 0 and self._pending:  # a session would consider the graph empty
            self._get_operation_by_name(next(iter(self._pending)))

    def make_operations(self) -> None:
        """Creates the missing Python objects.

        This takes half of the time of `tf.import_graph_def`, which also applies each device again and reads the
        colocation of each operation by catching an error.
        """
        for name in list(self._pending):
            self._get_operation_by_name(name)

    def _get_operation_by_name(self, name: str) -> tf.Operation:
        try:
            return super()._get_operation_by_name(name)
        except KeyError:
            if name not in self._pending:
                raise
            return self._create_op_from_tf_operation(self._pending.pop(name), compute_device=False)
