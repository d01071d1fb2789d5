"""GraphItem as a protobuf: the form in which a captured step is kept in a file."""

from __future__ import annotations

from autodist.graph.item import GraphItem
from autodist.graph.parts import Aggregation, Gradient, Variable
from autodist.proto import graph_item_pb2

_AGGREGATIONS = {
    Aggregation.NONE: graph_item_pb2.Variable.NONE,
    Aggregation.MEAN: graph_item_pb2.Variable.MEAN,
    Aggregation.SUM: graph_item_pb2.Variable.SUM,
    Aggregation.ONLY_FIRST_REPLICA: graph_item_pb2.Variable.ONLY_FIRST_REPLICA,
}

WHOLE = -1
"""The batch axis of an input that every replica gets whole."""


def to_proto(item: GraphItem) -> graph_item_pb2.GraphItem:
    """The step's graph, variables, gradients, inputs and outputs."""
    return graph_item_pb2.GraphItem(
        graph_def=item.graph_def.SerializeToString(deterministic=True),
        variables=[_variable(v) for v in item.variables],
        gradients=[_gradient(g) for g in item.gradients],
        inputs=[
            graph_item_pb2.Input(tensor=name, batch_axis=WHOLE if axis is None else axis)
            for name, axis in item.inputs.items()
        ],
        outputs=item.outputs,
    )


def _variable(variable: Variable) -> graph_item_pb2.Variable:
    return graph_item_pb2.Variable(
        name=variable.name,
        handle=variable.handle,
        shape=variable.shape,
        dtype=variable.dtype.as_datatype_enum,
        trainable=variable.trainable,
        aggregation=_AGGREGATIONS[variable.aggregation],
    )


def _gradient(gradient: Gradient) -> graph_item_pb2.Gradient:
    *indices, values = gradient.tensors
    if not indices:
        return graph_item_pb2.Gradient(variable=gradient.variable, dense=values, call=gradient.call)
    return graph_item_pb2.Gradient(variable=gradient.variable, indices=indices[0], values=values, call=gradient.call)
