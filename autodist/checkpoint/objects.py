"""SavedObjects: the values and keys that `tf.train.Checkpoint` would save for some objects, without reading a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2 as graph_pb2
from tensorflow.python.checkpoint import graph_view, save_util  # they compute the keys of a Checkpoint
from tensorflow.python.trackable import base
from tensorflow.python.training.saving.saveable_object import SaveSpec  # its tensor is read on access

from autodist.errors import CheckpointError

GRAPH_KEY = base.OBJECT_GRAPH_PROTO_KEY
"""Key of the object graph in a checkpoint."""


@dataclass(frozen=True)
class ObjectValue:
    """A saved value of one object.

    Attributes:
        key: its key in the checkpoint.
        full_name: its name for a `Saver`.
        variable: the variable with this value; None: the object is not a variable.
        read: returns the value.
    """

    key: str
    full_name: str
    variable: tf.Variable | None
    read: Callable[[], tf.Tensor]


@dataclass(frozen=True)
class SavedObjects:
    """Objects at a point in time.

    Attributes:
        values: the values to save, by key.
        graph: the object graph, with the key of each value.
        objects: the objects, by their node numbers in the graph.
    """

    values: Mapping[str, ObjectValue]
    graph: graph_pb2.TrackableObjectGraph
    objects: tuple[Any, ...]

    @classmethod
    def of(cls, root: tf.train.Checkpoint) -> SavedObjects:
        """Returns the objects and values that a Checkpoint would save now.

        Raises:
            CheckpointError: an object writes files of its own.
        """
        view = graph_view.ObjectGraphView(root)
        tensors, _, savers, graph = save_util.serialize_graph_view(view)
        if savers:
            raise CheckpointError(
                f"objects with a custom way of saving ({', '.join(sorted(savers))}) are not supported. Save "
                "them with a separate tf.train.Checkpoint."
            )
        names = {a.checkpoint_key: a.full_name for node in graph.nodes for a in node.attributes}
        values = {}
        for trackable, saved in tensors.items():
            for key, tensor in saved.items():
                values[key] = ObjectValue(key, names.get(key, ""), _variable_of(trackable), _reader(key, tensor))
        return cls(values, graph, tuple(view.breadth_first_traversal()[0]))

    @property
    def python_states(self) -> dict[str, tf.train.experimental.PythonState]:
        """The objects that restore their own state, by key."""
        nodes = zip(self.objects, self.graph.nodes, strict=True)
        states = [(one, node) for one, node in nodes if isinstance(one, tf.train.experimental.PythonState)]
        return {attribute.checkpoint_key: one for one, node in states for attribute in node.attributes}


def match(ours: graph_pb2.TrackableObjectGraph, theirs: graph_pb2.TrackableObjectGraph) -> dict[int, int]:
    """Maps nodes of one object graph to nodes of the other by their names, as `Checkpoint.restore` does.

    Keys cannot be compared: a key is the shortest path to an object, which changes when, for example, an optimizer
    gets a model's variables.
    """
    found = {0: 0}
    ahead = [0]
    for own in ahead:
        children = {child.local_name: child.node_id for child in theirs.nodes[found[own]].children}
        for child in ours.nodes[own].children:
            if child.local_name in children and child.node_id not in found:
                found[child.node_id] = children[child.local_name]
                ahead.append(child.node_id)
    return found


def build_optimizers(objects: SavedObjects, theirs: graph_pb2.TrackableObjectGraph) -> bool:
    """Creates the slots of optimizers that have none yet, for the variables that had slots in the checkpoint.

    Returns:
        True if an optimizer was built, so that there is more to restore.
    """
    found = match(objects.graph, theirs)
    variables = {node: objects.objects[own] for own, node in found.items()}
    built = False
    for own, node in found.items():
        optimizer = objects.objects[own]
        if not isinstance(optimizer, keras.Optimizer) or optimizer.built:
            continue
        trained = [variables.get(child) for child in _trained(theirs, node)]
        if trained and all(isinstance(variable, keras.Variable) for variable in trained):
            with keras.name_scope(optimizer.name, caller=optimizer):  # the scope in which `apply` calls it
                optimizer.build(trained)
            built = True
    return built


def _trained(graph: graph_pb2.TrackableObjectGraph, optimizer: int) -> Iterator[int]:
    """Yields the nodes of the variables that an optimizer trains, in its order."""
    for child in graph.nodes[optimizer].children:
        if child.local_name == "_trainable_variables":
            listed = [c for c in graph.nodes[child.node_id].children if c.local_name.isdigit()]
            yield from (c.node_id for c in sorted(listed, key=lambda c: int(c.local_name)))


def _variable_of(trackable: Any) -> tf.Variable | None:
    if isinstance(trackable, keras.Variable):
        trackable = trackable.value
    return trackable if isinstance(trackable, tf.Variable) else None


def _reader(key: str, tensor: Any) -> Callable[[], tf.Tensor]:
    if isinstance(tensor, Mapping):
        raise CheckpointError(f"{key} is saved in slices of its own, which is not supported.")

    def read() -> tf.Tensor:
        return tf.convert_to_tensor(tensor.tensor if isinstance(tensor, SaveSpec) else tensor)

    return read
