"""Manual regions in the partitioned step: their ends and collectives, and checks that they need no other transfers."""

from __future__ import annotations

from collections.abc import Sequence

from autodist.errors import StrategyError
from autodist.graph.names import tensor
from autodist.graph.node_rules import Rules
from autodist.graph.step import PlacedStep
from autodist.kernels.shard.divisible import require_lengths
from autodist.kernels.shard.reshards import Reshard, ReshardKind
from autodist.sharding import Mesh


class ManualRegions:
    """The manual regions of a step.

    A region computes with the numbers of one device: each of its operations has the operands that it has there, in the
    parts that the layouts and the collectives of the region leave to a place. Only these collectives exchange tensors.

    Args:
        step: the step; its annotations are in normal form.
        mesh: the mesh.
        rules: of the step's nodes.

    Raises:
        StrategyError: an axis does not divide a dimension.
    """

    def __init__(self, step: PlacedStep, mesh: Mesh, rules: Rules) -> None:
        self._step, self._mesh = step, mesh
        regions = step.annotations.regions.values() if step.annotations is not None else ()
        self._ends = {name: one for region in regions for name, one in region.exact.items()}
        self._inside = {name: region for region in regions for name in (*region.body, *region.outputs)}
        self._collectives = {name: one for region in regions for name, one in region.collectives.items()}
        require_lengths(self._ends, mesh, rules)

    def is_exact(self, name: str) -> bool:
        """Returns True if the result of a node has exactly the requested sharding."""
        return name in self._ends

    def check(self, name: str, operand: str, found: Sequence[Reshard]) -> None:
        """Checks the transfers that an operand of a node needs.

        Raises:
            StrategyError: a node of a region needs a transfer of its own, or a collective another one than its kind.
        """
        region = self._inside.get(name)
        if region is None:
            return
        collective = self._collectives.get(name)
        if collective is not None:
            if [one.kind for one in found] != [ReshardKind(collective.kind)]:
                needs = ", ".join(map(str, found)) or "nothing"
                raise StrategyError(
                    f"{collective.result.origin} gets {tensor(operand)}, for which it would have to do {needs}. "
                    f"{_EXPECTED[collective.kind]} (manual region: {region.origin})."
                )
            return
        sent = next((one for one in found if one.kind is not ReshardKind.SLICE and {*one.axes} & {*region.axes}), None)
        if sent is not None:
            node = self._step.graph_index.nodes[name]
            line = self._step.origin_of(name)
            end = "An output" if name in region.outputs else f"{node.op} {name}{f' ({line})' if line else ''}"
            raise StrategyError(
                f"{end} of the manual region ({region.origin}) needs {sent} of {tensor(operand)}, but only the "
                f"collectives of the region exchange tensors. Call ad.{sent.kind.value} before it, or change layouts."
            )


_EXPECTED = {
    "all_reduce": "An all-reduce takes a value whose sum over the axis is missing",
    "all_gather": "An all-gather takes a tensor that the axis divides along the dimension that is gathered",
    "reduce_scatter": "A reduce-scatter takes a value whose sum over the axis is missing",
    "all_to_all": "An all-to-all takes a tensor that the axis divides along `concat_axis`",
}
