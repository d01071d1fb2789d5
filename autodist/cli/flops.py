"""Floating point operations of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.ops import Trait, having
from autodist.graph.partial_count import PartialCount
from autodist.graph.step import Step

_GIVEN = having(Trait.FED | Trait.ITERATOR_GET)


def count_flops(item: Step, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """What `flops_of_nodes` counts in a step: not what has no formula or no shape, nor loops' later turns.

    Args:
        item: the captured step.
        shapes: of its inputs, by name.

    Returns:
        None where the shape of something that is fed, or that an iterator gives, is not known.
    """
    graph = with_inferred_shapes(item, sorted(item.named), shapes)
    given = [t for op in graph.get_operations() if op.type in _GIVEN for t in op.outputs]
    if not all(tensor.shape.is_fully_defined() for tensor in given):
        return None
    return PartialCount.of(flops_of_nodes(graph).values()).count
