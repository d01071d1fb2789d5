"""Graphs that are imported as they are, for whoever runs them or asks what TensorFlow infers of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session as c_api  # by which tf.import_graph_def imports
from tensorflow.python.framework import c_api_util  # likewise


class ImportedGraph(tf.Graph):
    """A graph into which others are imported without an object of Python for each of their operations.

    To make these is four fifths of what `tf.import_graph_def` takes. Here an operation has one from when it is asked
    for, by its name or as the input of another. Who asks an operation for its control inputs or a tensor for its
    consumers, or goes over `get_operations`, calls `make_operations` before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unasked: dict[str, Any] = {}

    def import_nodes(self, graph_def: tf.compat.v1.GraphDef, prefix: str = "") -> None:
        """Adds nodes and functions as they stand, with their devices; no scope counts for them.

        Args:
            graph_def: what to import.
            prefix: stands before the nodes' names, and a slash between; "": they keep their names.

        Raises:
            ValueError: TensorFlow does not take the graph.
        """
        asked = c_api_util.ScopedTFImportGraphDefOptions()
        c_api.TF_ImportGraphDefOptionsSetPrefix(asked.options, prefix)
        text = c_api.TF_NewBufferFromString(graph_def.SerializeToString())
        try:
            with self._mutation_lock(), self._c_graph.get() as graph:
                c_api_util.ScopedTFImportGraphDefResults(
                    c_api.TF_GraphImportGraphDefWithResults(graph, text, asked.options)
                )
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(str(error)) from error
        finally:
            c_api.TF_DeleteBuffer(text)
        self._unasked.update((c_api.TF_OperationName(made), made) for made in self.new_operations())
        if self.version == 0 and self._unasked:  # which a session takes for a graph of no operations
            self._get_operation_by_name(next(iter(self._unasked)))

    def make_operations(self) -> None:
        """Makes the objects that nobody has asked for.

        This takes half of what `tf.import_graph_def` does, which applies each device once more and asks each operation
        for its colocation by an error.
        """
        for name in list(self._unasked):
            self._get_operation_by_name(name)

    def _get_operation_by_name(self, name: str) -> tf.Operation:
        try:
            return super()._get_operation_by_name(name)
        except KeyError:
            if name not in self._unasked:
                raise
            return self._create_op_from_tf_operation(self._unasked.pop(name), compute_device=False)
