"""Dependence of the tensors of a captured step on its batch."""

from __future__ import annotations

from collections.abc import Sequence

from autodist.graph.propagation import PerExample, Propagation, Replicated, propagate
from autodist.graph.seeds import declare_seeds
from autodist.graph.step import Step


def flows_of(item: Step) -> Propagation:
    """Propagates the batch axis through the captured step; the seeds are declared."""
    axes = {name: axis for name, axis in item.inputs.items() if axis is not None}
    flows = propagate(
        item.graph_def,
        axes,
        lambda name: item.spec_of(name).shape,
        nodes=item.graph_index.nodes,
        whole_sums={s.node: s for s in item.whole_sums},
        apart=item.apart,
        declared={variable.handle: Replicated(is_generator=True) for variable in item.variables if variable.is_seed},
    )
    declare_seeds(item, flows)
    return flows


def row_axes(item: Step) -> Sequence[int | None]:
    """Returns for each output of a captured step the axis whose rows belong to examples; None: there is none."""
    flows = flows_of(item)
    kinds = [flows.kind(name) for name in item.outputs]
    return [kind.axis if isinstance(kind, PerExample) else None for kind in kinds]
