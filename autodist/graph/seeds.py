"""Seeds: the loss scale of each replica in a gradient, derived from the differentiated tensors.

Within a step every cotangent equals that of one device. The seed of a gradient of a mean is therefore, on each replica,
its share of the whole batch, w / Σ w; that of a sum or of rows is 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autodist.graph.loss_terms import find_terms, loss_kind
from autodist.graph.names import node_of, tensor
from autodist.graph.parts import GradientCall, Term
from autodist.graph.step import CapturedStep, Step
from autodist.graph.walks import reach
from autodist.layout import (
    Examples,
    GraphPropagation,
    Mean,
    PerExample,
    Propagation,
    Replicated,
    Sum,
    Unknown,
    Weight,
)
from autodist.layout.linearity import Grade, find_linearity


@dataclass(frozen=True)
class Undecided:
    """A differentiated tensor whose dependence on the batch is unknown.

    Attributes:
        target: the differentiated tensor.
        reason: explanation for the user.
    """

    target: str
    reason: str


def seed_weight(
    step: CapturedStep, flows: Propagation, call: GradientCall, is_reduced: bool
) -> Weight | Undecided | None:
    """Returns the weight that determines each replica's share as the seed; None if the seed is 1 on all.

    Args:
        step: the step.
        flows: dependence of tensors on the batch; the seeds of earlier calls are declared.
        call: a call of `gradient` whose targets have one weight.
        is_reduced: True if its gradients are summed over the replicas.
    """
    kinds = [loss_kind(step, flows, target) if is_reduced else flows.kind(target) for target in call.targets]
    weights = {kind.weight for kind in kinds if isinstance(kind, Mean)}
    if all(isinstance(kind, Sum | PerExample) for kind in kinds):
        return None
    if all(isinstance(kind, Replicated) for kind in kinds):
        return Examples() if is_reduced else None  # equal values on all replicas have equal gradients
    if len(weights) == 1 and all(isinstance(kind, Mean | Replicated) for kind in kinds):
        return weights.pop()
    unknown = [(t, k.reason) for t, k in zip(call.targets, kinds, strict=True) if isinstance(k, Unknown)]
    return Undecided(*(unknown or [(call.targets[0], "its targets are means with different weights")])[0])


def live_calls(step: Step) -> list[int]:
    """Returns the positions of the calls of `gradient` that an output or target depends on."""
    roots = [*map(node_of, step.outputs), *step.targets]
    needed = reach(roots, step.graph_index.sources.__getitem__)
    return [k for k, call in enumerate(step.gradient_calls) if not needed.isdisjoint(call.seeds)]


def replica_dependent_seeds(step: CapturedStep, flows: Propagation) -> list[str]:
    """Returns the seeds that differ between replicas, once the terms are settled."""
    reduced = reduced_calls(step)
    result: list[str] = []
    for k in live_calls(step):
        call = step.gradient_calls[k]
        weight = None if call.terms else seed_weight(step, flows, call, k in reduced)
        if k in reduced or call.terms or not (weight is None or isinstance(weight, Undecided)):
            result += call.seeds
    return result


def declare_seeds(step: CapturedStep, flows: GraphPropagation) -> None:
    """Declares the seeds to the propagation, in the order of the gradient calls."""
    reduced = reduced_calls(step)
    for position, call in enumerate(step.gradient_calls):
        terms = call.terms if call.is_settled else find_terms(step, flows, call)
        for term in terms:
            _declare_term(step, flows, term)
        if terms:
            continue
        weight = seed_weight(step, flows, call, position in reduced)
        if isinstance(weight, Undecided):
            weight = Examples() if position in reduced else None  # the assumption in this case
        if weight is not None:
            flows.declare_share(call.seed, weight)


def _declare_term(step: CapturedStep, flows: GraphPropagation, term: Term) -> None:
    flows.declare_whole(term.value)
    kind = loss_kind(step, flows, term.tensor)
    if isinstance(kind, Mean | Unknown):
        flows.declare_share(term.seed, kind.weight if isinstance(kind, Mean) else Examples())
    elif isinstance(kind, Replicated):
        flows.declare_share(term.seed, None)


def reduced_calls(step: CapturedStep) -> set[int]:
    """Returns the positions of the calls of `gradient` whose gradients are summed over the replicas."""
    reduced = {gradient.call for gradient in step.gradients}
    return reduced | calls_through_all_reduce(step, reduced)


def calls_through_all_reduce(step: CapturedStep, but: Collection[int]) -> set[int]:
    """Returns the positions of the calls whose gradients pass an in-step all-reduce.

    Args:
        step: the step.
        but: positions of calls to ignore.
    """
    gradients = [tensor(s.node) for s in step.in_step_all_reduces if s.of is not None]
    candidates = [k for k in range(len(step.gradient_calls)) if k not in but] if gradients else []
    seen = {k: find_linearity(step.graph_index, [step.gradient_calls[k].seed]) for k in candidates}
    return {k for k, linearity in seen.items() if any(linearity.of(name) is Grade.LINEAR for name in gradients)}
