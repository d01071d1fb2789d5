"""What the layers of a model compute forward and back, before anybody has cut it into pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.pipeline_assignment import Assignment
from autodist.graph.step import Step

OPEN_LENGTH = 32
"""What counts for a length that the step leaves open, that of the batch mostly."""

_FED = having(Trait.FED)


def layer_flops(item: Step, layers: Sequence[Collection[str]]) -> list[int] | None:
    """FLOPs of each layer, forward and back, each layer counting as a pipeline stage.

    Batches have `OPEN_LENGTH` examples, whose number scales all layers alike, since no batch is known where a strategy
    is chosen; so equal steps have equal counts. What has no formula or no shape counts nothing.

    Args:
        item: the captured step.
        layers: names of the variables of each, in the order in which the layers come.

    Returns:
        None where nothing can be counted, or the step does not bear such lengths.
    """
    layer_of = {item.by_name[name].handle: k for k, names in enumerate(layers) for name in names}
    wanted = sorted({node_of(t) for gradient in item.gradients for t in gradient.tensors})
    shapes = {tensor(name): lengths for name in item.inputs if (lengths := _filled(item, name)) is not None}
    try:
        of_nodes = flops_of_nodes(with_inferred_shapes(item, wanted, shapes))
    except ValueError:  # TensorFlow's: the step does not bear such lengths
        return None
    found = [0] * len(layers)
    for name, part in _Estimate(item, layer_of, len(layers)).run().items():
        found[part.stage] += of_nodes.get(name) or 0
    return found if any(found) else None


def _filled(item: Step, name: str) -> list[int] | None:
    """The shape of an input, whose open lengths are filled in; None where not even its rank is known."""
    node = item.graph_index.nodes.get(node_of(name))
    if node is None or node.op not in _FED or "shape" not in node.attr or node.attr["shape"].shape.unknown_rank:
        return None
    return [dim.size if dim.size >= 0 else OPEN_LENGTH for dim in node.attr["shape"].shape.dim]


class _Estimate(Assignment):
    """Each layer as a stage of its own, whatever goes back between layers that will lie in one stage."""

    def refuse(self, option: str, reason: str) -> None:
        pass

    def mark_of(self, name: str) -> int | None:
        return None
