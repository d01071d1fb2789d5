"""Checks of constraints that need the batch and the lengths of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autodist.errors import StrategyError
from autodist.graph.flows import flows_of
from autodist.graph.node_rules import Rules
from autodist.graph.step import PlacedStep
from autodist.kernels.shard.propagate import divides
from autodist.layout import PerExample, Propagation, Unknown
from autodist.sharding import Constraint, Mesh


def without_batch_axis(step: PlacedStep, axis: str) -> PlacedStep:
    """Removes the axis of the batch from constraints: `Replicate` divides the batch.

    Raises:
        StrategyError: a constraint divides another dimension than that of the examples along this axis.
    """
    annotations = step.annotations
    if annotations is None or not axis:
        return step
    flows = None
    ends = [(name, one) for region in annotations.regions.values() for name, one in region.exact.items()]
    for name, one in [*annotations.constraints.items(), *ends]:
        at = next((k for k, dim in enumerate(one.sharding.dims) if axis in dim.axes), None)
        if at is None:
            continue
        flows = flows or step.flows or flows_of(step)
        if not _may_be_examples(step, flows, f"{name}:0", at) or one.sharding.dims[at].axes != (axis,):
            raise StrategyError(
                f"{one.origin} divides dimension {at} of {name} along {axis!r}, the axis of the batch, but the "
                f"examples are not along this dimension. Name {axis!r} for the dimension of the examples only."
            )
    return replace(step, annotations=annotations.map(lambda one: replace(one, sharding=one.sharding.without([axis]))))


def _may_be_examples(step: PlacedStep, flows: Propagation, name: str, at: int) -> bool:
    """Returns True if a dimension is that of the examples; if this is unknown, as for many gradients, if it is open."""
    kind = flows.kind(name)
    if isinstance(kind, Unknown):
        return step.spec_of(name).shape[at] is None
    return isinstance(kind, PerExample) and kind.axis == at


def require_lengths(constraints: Mapping[str, Constraint], mesh: Mesh, rules: Rules) -> None:
    """Checks that constraints on the first outputs of nodes divide dimensions of known lengths without rest.

    Raises:
        StrategyError: a dimension does not divide.
    """
    for name, one in constraints.items():
        lengths = rules.static.lengths(f"{name}:0") or (None,) * one.sharding.rank
        for at, (length, dim) in enumerate(zip(lengths, one.sharding.dims, strict=True)):
            parts = mesh.count(dim.axes)
            if parts > 1 and not divides(length, parts):
                has = "depends on the batch" if length is None else f"has the length {length}"
                raise StrategyError(
                    f"{one.origin} divides dimension {at} of {name} into {parts} parts, but the dimension {has}. "
                    "Divide another dimension, or change the size of the axis."
                )
