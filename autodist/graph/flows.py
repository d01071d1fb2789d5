"""Dependence of the tensors of a captured step on its batch."""

from __future__ import annotations

from collections.abc import Sequence

from autodist.graph.seeds import declare_seeds
from autodist.graph.step import CapturedStep
from autodist.layout import PerExample, Propagation, Replicated, propagate


def flows_of(step: CapturedStep) -> Propagation:
    """Propagates the batch axis through the captured step; the seeds are declared."""
    flows = propagate(
        step.graph_def,
        step.batch_axes,
        lambda name: step.spec_of(name).shape,
        nodes=step.graph_index.nodes,
        in_step_all_reduces={s.node: s for s in step.in_step_all_reduces},
        apart=step.apart,
        declared={variable.handle: Replicated(is_generator=True) for variable in step.variables if variable.is_seed},
    )
    declare_seeds(step, flows)
    return flows


def row_axes(step: CapturedStep) -> Sequence[int | None]:
    """Returns for each output of a captured step the axis whose rows belong to examples; None: there is none."""
    flows = flows_of(step)
    kinds = [flows.kind(name) for name in step.outputs]
    return [kind.axis if isinstance(kind, PerExample) else None for kind in kinds]
