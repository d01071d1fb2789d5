"""Megatron: a mesh whose layouts are found in the graph of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from autodist.errors import StrategyError
from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.sharding import OPEN, Sharding
from autodist.strategies.mesh import Mesh
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike

MOST_REASONS = 5
"""Of matrices that stay whole, those that an error lists with the reason."""


@register
@dataclass(frozen=True)
class Megatron(Mesh):
    """Divides pairs of matrices over one axis of a mesh, the first by columns and the second by rows.

    The pairs are found in the graph of the step: between them stand only elementwise operations, moves of axes and
    products over batches of matrices. The query, key and value of an attention are divided by heads, and the output
    projection by rows; the first layer of a perceptron by columns, and the second by rows. A table that an input of the
    step indexes, as that of tokens, is divided along its rows. Variables whose lengths do not divide stay whole, and so
    do those without a partner; the plan shows the reason. The strategy is that of `Mesh` with these layouts. Layouts of
    `variables` come first. Without a graph there are no others.

    Cost: a pair sends one sum of activations forward and one backward.

    Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    2019.

    Attributes:
        mesh: the size of each axis, by name; one may be -1, as for `Mesh`.
        model: the axis along which matrices are divided.
    """

    mesh: dict[str, int] = field(default_factory=lambda: {"model": -1})
    model: str = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in self._other_axes:
            raise OptionError(
                "mesh" if self.model not in self.mesh else "model",
                f"mesh is {dict(self.mesh)!r}, but Megatron divides matrices along the axis {self.model!r}, and the "
                f"batch along {self.data!r}. Give the mesh an axis for matrices, or set `model` to its name.",
            )

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        """Builds the strategy.

        Raises:
            StrategyError: no variable has a layout, or one that is requested does not fit.
        """
        strategy = super().build(graph_item, resource_spec)
        decided = [one.variable for one in strategy.mesh.variables]
        sizes = self.of_places(resource_spec).sizes
        strategy.mesh.variables.extend(self._found(graph_item, sizes[self.model], decided))
        return strategy

    def _found(
        self, graph_item: GraphLike, parts: int, decided: Collection[str]
    ) -> Iterator[strategy_pb2.VariableSharding]:
        """Yields the shardings of the pairs, and open ones of matrices that stay whole, with the reason.

        Args:
            graph_item: the step.
            parts: size of the axis.
            decided: variables that have a layout already.

        Raises:
            StrategyError: there is neither a pair nor a requested layout.
        """
        # Imports TensorFlow only if there is a graph, which TensorFlow has created.
        from autodist.graph.matrix_pairs import find_pairs
        from autodist.graph.step import CapturedStep

        if not isinstance(graph_item, CapturedStep):
            return
        ranks = {variable.name: len(variable.shape) for variable in graph_item.variables}
        pairs = find_pairs(graph_item, parts, decided)
        if not pairs.divided and not decided:
            raise StrategyError(_nothing_found(pairs.whole, f"{self.model!r} of size {parts}"))
        for name, one in pairs.divided.items():
            sharding = Sharding.replicated(ranks[name]).with_axes(one.dimension, [self.model])
            yield strategy_pb2.VariableSharding(variable=name, sharding=str(sharding), origin=f"Megatron: {one.role}")
        for name, reason in pairs.whole.items():
            sharding = Sharding((OPEN,) * ranks[name])
            yield strategy_pb2.VariableSharding(variable=name, sharding=str(sharding), origin=f"Megatron: {reason}")


def _nothing_found(whole: dict[str, str], axis: str) -> str:
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in list(whole.items())[:MOST_REASONS])
    return (
        f"Megatron finds no pair of matrices, and no table, that the axis {axis} divides. Use AllReduce or FSDP, "
        f"another size of the axis, or `builder: Mesh` with the layouts of your variables."
        + (f" The matrices of this step, with the reason why they stay whole:{reasons}" if reasons else "")
    )
