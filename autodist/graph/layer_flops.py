"""FLOPs of the layers of a model, forward and backward, before it is partitioned into pipeline stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.pipeline_assignment import Assignment
from autodist.graph.step import CapturedStep

OPEN_LENGTH = 32
"""Assumed length of an unknown axis, usually the batch axis."""

_FED = having(Trait.FED)


def layer_flops(step: CapturedStep, layers: Sequence[Collection[str]]) -> list[int] | None:
    """Returns the FLOPs of each layer, forward and backward, as if each were a pipeline stage.

    Batches have `OPEN_LENGTH` examples, since the batch is unknown when a strategy is chosen. The number scales all
    layers alike, so equal steps have equal counts. Nodes without a formula or a shape count as 0.

    Args:
        step: the captured step.
        layers: names of the variables of each layer, in the order of the layers.

    Returns:
        None if nothing can be counted, or the step does not support such lengths.
    """
    layer_of = {step.by_name[name].handle: k for k, names in enumerate(layers) for name in names}
    wanted = sorted({node_of(t) for gradient in step.gradients for t in gradient.tensors})
    shapes = {tensor(name): lengths for name in step.inputs if (lengths := _filled(step, name)) is not None}
    try:
        of_nodes = flops_of_nodes(with_inferred_shapes(step, wanted, shapes))
    except ValueError:  # TensorFlow's: the step does not support such lengths
        return None
    flops = [0] * len(layers)
    for name, part in _Estimate(step, layer_of, len(layers)).run().items():
        flops[part.stage] += of_nodes.get(name) or 0
    return flops if any(flops) else None


def _filled(step: CapturedStep, name: str) -> list[int] | None:
    """Returns the shape of an input with unknown lengths replaced; None if not even its rank is known."""
    node = step.graph_index.nodes.get(node_of(name))
    if node is None or node.op not in _FED or "shape" not in node.attr or node.attr["shape"].shape.unknown_rank:
        return None
    return [dim.size if dim.size >= 0 else OPEN_LENGTH for dim in node.attr["shape"].shape.dim]


class _Estimate(Assignment):
    """Assigns each layer to a stage of its own, even if data flows back between layers that will share a stage."""

    def refuse(self, option: str, reason: str) -> None:
        pass

    def mark_of(self, name: str) -> int | None:
        return None
