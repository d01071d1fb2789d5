"""Seeds: by how much each replica's part counts in a gradient, found from what was differentiated.

Within a step every cotangent equals one device's. So the seed of a gradient of a mean is, on each replica, its share of
the whole batch, w / Σ w; that of a sum, or of rows, is 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autodist.graph.linearity import Grade, find_linearity
from autodist.graph.loss_terms import find_terms, loss_kind
from autodist.graph.names import node_of, tensor
from autodist.graph.parts import GradientCall, Term
from autodist.graph.propagation import (
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
from autodist.graph.step import Step
from autodist.graph.walks import reach


@dataclass(frozen=True)
class Undecided:
    """It is not known how what was differentiated depends on the batch.

    Attributes:
        target: what was differentiated.
        reason: in words that a user can read.
    """

    target: str
    reason: str


def seed_weight(item: Step, flows: Propagation, call: GradientCall, is_joined: bool) -> Weight | Undecided | None:
    """The weight of which a seed is each replica's share; None where it is 1 on all.

    Args:
        item: the step.
        flows: how tensors depend on the batch; the seeds of earlier calls are declared.
        call: of `gradient`, all of which has one weight.
        is_joined: whether its gradients are added up over the replicas.
    """
    kinds = [loss_kind(item, flows, target) if is_joined else flows.kind(target) for target in call.targets]
    weights = {kind.weight for kind in kinds if isinstance(kind, Mean)}
    if all(isinstance(kind, Sum | PerExample) for kind in kinds):
        return None
    if all(isinstance(kind, Replicated) for kind in kinds):
        return Examples() if is_joined else None  # what is alike on all is differentiated alike
    if len(weights) == 1 and all(isinstance(kind, Mean | Replicated) for kind in kinds):
        return weights.pop()
    unknown = [(t, k.reason) for t, k in zip(call.targets, kinds, strict=True) if isinstance(k, Unknown)]
    return Undecided(*(unknown or [(call.targets[0], "its targets are means with different weights")])[0])


def live_calls(item: Step) -> list[int]:
    """Positions of the calls of `gradient` on which something depends that runs."""
    roots = [*map(node_of, item.outputs), *item.targets]
    needed = reach(roots, item.graph_index.sources.__getitem__)
    return [k for k, call in enumerate(item.gradient_calls) if not needed.isdisjoint(_seeds_of(call, call.terms))]


def varying_seeds(item: Step, flows: Propagation) -> list[str]:
    """The seeds that replicas have different values for, once the terms are settled."""
    joined = joined_calls(item)
    found = []
    for k in live_calls(item):
        call = item.gradient_calls[k]
        weight = None if call.terms else seed_weight(item, flows, call, k in joined)
        if k in joined or call.terms or not (weight is None or isinstance(weight, Undecided)):
            found += _seeds_of(call, call.terms)
    return found


def declare_seeds(item: Step, flows: GraphPropagation) -> None:
    """Says of the seeds what they are, in the order in which the gradients were made."""
    joined = joined_calls(item)
    for position, call in enumerate(item.gradient_calls):
        terms = call.terms if call.is_settled else find_terms(item, flows, call)
        for term in terms:
            _declare_term(item, flows, term)
        if terms:
            continue
        weight = seed_weight(item, flows, call, position in joined)
        if isinstance(weight, Undecided):
            weight = Examples() if position in joined else None  # for which it is taken
        if weight is not None:
            flows.declare_share(call.seed, weight)


def _declare_term(item: Step, flows: GraphPropagation, term: Term) -> None:
    kind = loss_kind(item, flows, term.tensor)
    if isinstance(kind, Mean | Unknown):
        flows.declare_share(term.seed, kind.weight if isinstance(kind, Mean) else Examples())
    elif isinstance(kind, Replicated):
        flows.declare_share(term.seed, None)


def joined_calls(item: Step) -> set[int]:
    """Positions of the calls of `gradient` whose gradients are added up over the replicas."""
    joined = {gradient.call for gradient in item.gradients}
    return joined | summed_on_the_way(item, joined)


def summed_on_the_way(item: Step, but: Collection[int]) -> set[int]:
    """Positions of the calls whose gradients a whole sum adds up over the replicas on the way.

    Args:
        item: the step.
        but: positions of calls that are not asked about.
    """
    gradients = [tensor(s.node) for s in item.whole_sums if s.of is not None]
    asked = [k for k in range(len(item.gradient_calls)) if k not in but] if gradients else []
    seen = {k: find_linearity(item.graph_index, [item.gradient_calls[k].seed]) for k in asked}
    return {k for k, found in seen.items() if any(found.of(name) is Grade.LINEAR for name in gradients)}


def _seeds_of(call: GradientCall, terms: Sequence[Term]) -> list[str]:
    return [call.seed, *(term.seed for term in terms)]
