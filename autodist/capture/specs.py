"""Shapes and dtypes of a captured graph's tensors, noted so that the graph itself need not be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf


def note_specs(
    graph: tf.Graph, nodes: Iterable[str], placeholders: Mapping[str, str] | None = None
) -> Callable[[str], tf.TensorSpec]:
    """Static shape and dtype by the name of a tensor, for the tensors of `nodes`.

    A graph's Python objects take several times the memory of its definition. What is returned refers to none of them:
    a traced graph ends once its capture is over.

    Args:
        graph: the graph that has the nodes.
        nodes: their names.
        placeholders: those among them that the graph does not have, with the tensors for which they stand.

    Raises:
        KeyError: by what is returned, for a tensor that was not noted.
    """
    alike: dict[tuple[object, tf.DType], tf.TensorSpec] = {}

    def spec(tensor: tf.Tensor) -> tf.TensorSpec:
        shape = tensor.shape
        key = (None if shape.rank is None else tuple(shape.as_list()), tensor.dtype)
        return alike.setdefault(key, tf.TensorSpec(shape, tensor.dtype))

    stand_for = placeholders or {}

    def outputs(name: str) -> Sequence[tf.Tensor]:
        if name in stand_for:
            return (graph.get_tensor_by_name(stand_for[name]),)
        return graph.get_operation_by_name(name).outputs

    return {f"{name}:{k}": spec(made) for name in nodes for k, made in enumerate(outputs(name))}.__getitem__
