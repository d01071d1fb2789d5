"""AddDataFlowEdges: finds the tensors that are sharded alike since one has the value of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.names import tensor
from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context, Kernel
from autodist.kernels.place.slots import find_slots
from autodist.kernels.shard.annotated import annotated, sharding_of, with_annotations
from autodist.kernels.shard.flow_ties import FlowTies, Tie
from autodist.kernels.shard.separate_calls import separate_calls
from autodist.sharding import Annotations, Constraint, DataFlowEdge, Sharding


@dataclass(frozen=True)
class AddDataFlowEdges(Kernel[CapturedStep, CapturedStep]):
    """Adds an edge for each variable, and for each value that passes control flow or enters or leaves a manual region.

    The edge of a variable has its sharding, and so has the edge of its slots with the same shape. Another edge has the
    axes of the first of its tensors with a sharding; all of its dimensions are open. Source: the data-flow edges of
    Shardy.

        while (i, h)    becomes    one edge: h, body result → output, body argument, condition argument

    There is no edge for scalars, handles, strings and tensors of unknown rank. Lists of tensors stay whole.
    """

    name: ClassVar[str] = "add-data-flow-edges"
    after: ClassVar[Mapping[str, str]] = {
        "complete-manual-regions": "the edge of an input has the axes that are not manual",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if annotated(step) is None:
            return step
        step = separate_calls(step)
        annotations = step.annotations
        assert annotations is not None
        found = FlowTies.of(step)
        slots = _slot_shardings(step, annotations)
        edges = [*_edges(annotations, slots, found.ties), *_edges_of_regions(step, annotations)]
        return with_annotations(step, replace(annotations, edges=tuple(edges), whole=found.whole))


def _edges(annotations: Annotations, slots: Mapping[str, Constraint], ties: Iterable[Tie]) -> list[DataFlowEdge]:
    edges = []
    for tie in _united(ties):
        if tie.owner is not None:
            constraint = annotations.variables.get(tie.owner) or slots.get(tie.owner)
        else:
            known = (sharding_of(annotations, name) for name in (*tie.sources, *tie.targets))
            constraint = next((opened(one) for one in known if one and one.sharding.divides), None)
        sources, targets = tuple(dict.fromkeys(tie.sources)), tuple(dict.fromkeys(tie.targets))
        if sources or targets:
            edges.append(DataFlowEdge(tie.owner or targets[0], sources, targets, constraint))
    return edges


def _united(ties: Iterable[Tie]) -> list[Tie]:
    """Returns ties of which no two have a target in common, as the arguments of a function with two calls have."""
    found: list[Tie] = []
    tie_of: dict[str, Tie] = {}
    for tie in ties:
        known = next((tie_of[name] for name in tie.targets if name in tie_of), None)
        if known is None:
            found.append(known := Tie([], [], tie.owner))
        known.sources += tie.sources
        known.targets += tie.targets
        tie_of.update(dict.fromkeys(tie.targets, known))
    return found


def opened(one: Constraint) -> Constraint:
    """Returns the axes of a sharding, with all dimensions open."""
    dims = tuple(replace(dim, is_open=True) for dim in one.sharding.dims)
    return replace(one, sharding=Sharding(dims, mesh=one.sharding.mesh))


def _slot_shardings(step: CapturedStep, annotations: Annotations) -> dict[str, Constraint]:
    """Returns the shardings of slots that have the shape of their variable, by name."""
    return {
        slot.name: annotations.variables[name]
        for name, slots in find_slots(step).items() if name in annotations.variables
        for slot in slots if slot.shape == step.by_name[name].shape
    }  # fmt: skip


def _edges_of_regions(step: CapturedStep, annotations: Annotations) -> Iterable[DataFlowEdge]:
    """Yields an edge for each input and output of a manual region; its sharding has the axes that are not manual."""
    for region in annotations.regions.values():
        for marker, one in {**region.inputs, **region.outputs}.items():
            free = replace(one, sharding=one.sharding.without(region.axes))
            yield DataFlowEdge(tensor(marker), tuple(step.graph_index.inputs(marker)), (tensor(marker),), free)
