"""Activations: the tensors of the forward pass that a step keeps for the backward pass."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.partial_count import PartialCount
from autodist.graph.recomputation import backward_passes
from autodist.graph.step import Step
from autodist.graph.walks import reach

SAME_BUFFER = having(Trait.IDENTITY | Trait.RESHAPES)
"""Ops that usually return the buffer of their first input."""

_NO_ACTIVATIONS = having(Trait.SOURCE | Trait.ITERATOR_GET | Trait.BY_SHAPES)
"""Ops whose outputs exist in any case (inputs, constants and variables), or are small."""


def activation_bytes(step: Step, inferred: tf.Graph) -> PartialCount:
    """Returns the bytes of the activations of one replica, each buffer once.

    These are the tensors of the forward pass that the backward pass reads. The values of parameters and inputs, which
    exist in any case, do not count. Lists that a loop keeps have no static shape, so the count is a lower bound then.

    Args:
        step: a step whose graph has not been replicated.
        inferred: the step's nodes, with the shapes that follow from those of its inputs.
    """
    names = {op.name for op in inferred.get_operations()}
    return PartialCount.of(byte_size(inferred, name) for name in _kept(step) if node_of(name) in names)


def _kept(step: Step) -> dict[str, None]:
    graph_index = step.graph_index
    gradients = reach((node_of(t) for one in step.gradients for t in one.tensors), graph_index.sources.__getitem__)
    kept: dict[str, None] = {}
    for backward in backward_passes(step):
        for reader in graph_index.order:
            if reader in backward and reader in gradients:  # not the optimizer, which reads gradients
                read = graph_index.inputs(reader)
                kept.update(dict.fromkeys(_buffer(step, name) for name in read if node_of(name) not in backward))
    return {name: None for name in kept if graph_index.nodes[node_of(name)].op not in _NO_ACTIVATIONS}


def _buffer(step: Step, name: str) -> str:
    """Returns the tensor that owns the buffer of a tensor."""
    nodes = step.graph_index.nodes
    while nodes[node_of(name)].op in SAME_BUFFER:
        name = tensor(nodes[node_of(name)].input[0])
    return name


def byte_size(inferred: tf.Graph, name: str) -> int | None:
    """Returns the bytes of a tensor; None if its shape is not known."""
    found = inferred.get_tensor_by_name(name)
    return int(found.shape.num_elements()) * found.dtype.size if found.shape.is_fully_defined() else None
