"""Terms of a loss: the values into which it is decomposed if its parts need different loss scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import GradientCall, Term
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.layout import (
    Elements,
    Examples,
    Kind,
    Mean,
    PerExample,
    Propagation,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
    Weight,
)


def loss_kind(step: CapturedStep, flows: Propagation, name: str) -> Kind:
    """Returns the layout of a differentiated tensor.

    A graph that was built for a fixed number of examples may divide a sum by a constant equal to that number. The
    layout of the quotient is then unknown: a sum or a mean.
    """
    kind = flows.kind(name)
    if step.rows is None or not isinstance(kind, Sum | PerExample):
        return kind
    return Unknown(
        f"it sums over placeholders with fixed shapes, for {step.rows} examples a worker; a constant may divide it "
        "by their number"
    )


def one_weight(kinds: Sequence[Kind]) -> bool:
    """Returns True if one loss scale suits values of all these kinds: that of a mean, or 1 for sums."""
    if all(isinstance(kind, Sum | PerExample) for kind in kinds):
        return True
    weights = {kind.weight for kind in kinds if isinstance(kind, Mean)}
    return len(weights) <= 1 and all(isinstance(kind, Mean | Replicated) for kind in kinds)


def find_terms(step: CapturedStep, flows: Propagation, call: GradientCall) -> list[Term]:
    """Returns the terms of one gradient call, each with a scale of its own; empty if one scale suits all.

    A value known to be a mean, a sum or equal on all replicas is a term. Other values are decomposed if arithmetic
    computes them from known values.
    """
    return _Search(step, flows, call).run() if call.terms else []


@dataclass(frozen=True)
class _Search:
    step: CapturedStep
    flows: Propagation
    call: GradientCall

    def run(self) -> list[Term]:
        tops = [k for k, term in enumerate(self.call.terms) if term.tensor in self.call.targets]
        if one_weight([self._kind(k) for k in tops]) and all(self._is_additive(k) for k in tops):
            return []
        positions = self._decompose(tops)
        kinds = [self._kind(k) for k in positions]
        if all(isinstance(kind, Unknown | Replicated) or kind == Mean(Examples()) for kind in kinds):
            if any(isinstance(kind, Unknown) for kind in kinds):
                return []  # the loss is assumed to be a mean over the examples
        return [self.call.terms[k] for k in sorted(positions)]

    def _decompose(self, tops: Iterable[int]) -> set[int]:
        """Returns the positions of the terms; no term is part of another."""
        result: set[int] = set()
        front = list(tops)
        while front:
            k = front.pop()
            if self._is_additive(k) or not self._has_known_parts(k):
                result.add(k)
            else:
                front += self.call.terms[k].parts
        while above := {k for k in result if not result.isdisjoint(self._below(k))}:
            result = result - above | {part for k in above for part in self.call.terms[k].parts}
        return result

    def _below(self, k: int) -> set[int]:
        return reach(self.call.terms[k].parts, lambda part: self.call.terms[part].parts)

    def _kind(self, k: int) -> Kind:
        return loss_kind(self.step, self.flows, self.call.terms[k].tensor)

    def _is_additive(self, k: int) -> bool:
        """Returns True if the scaled gradients of the replicas through a value add up to those of one device."""
        kind, term = self._kind(k), self.call.terms[k]
        if isinstance(kind, Mean):
            return not term.parts or not (self._is_trained(kind.weight) or self._is_divided_by_none(kind.weight))
        return isinstance(kind, Replicated | Sum) or (isinstance(kind, PerExample) and term.tensor in self.call.targets)

    def _has_known_parts(self, k: int) -> bool:
        """Returns True if a term has parts, and none has a row for each example: replicas lack each other's rows."""
        parts = self.call.terms[k].parts
        return bool(parts) and not any(isinstance(self._kind(part), PerExample) for part in parts)

    def _is_divided_by_none(self, weight: Weight) -> bool:
        """Returns True if a replica whose examples are all masked may compute 0 / 0 while others have gradients."""
        return bool(self.step.in_step_all_reduces) and not isinstance(weight, Examples | Elements)

    def _is_trained(self, weight: Weight) -> bool:
        """Returns True if gradients reach a variable through the weight of a mean.

        The numerator and the denominator of the mean then need to be known separately.
        """
        if isinstance(weight, Examples | Elements):
            return False
        assert isinstance(weight, Scalar | Total)
        below = isinstance(weight, Total) and self._is_trained(weight.weight)
        return below or self._reaches_variable(weight.tensor)

    def _reaches_variable(self, name: str) -> bool:
        k = self.step.gradient_calls.index(self.call)
        handles = {self.step.by_name[g.variable].handle for g in self.step.gradients if g.call == k}
        return not handles.isdisjoint(map(node_of, reach([tensor(name)], self._differentiated)))

    def _differentiated(self, name: str) -> list[str]:
        """Returns the inputs of a node through which gradients may pass."""
        node = self.step.graph_index.nodes[node_of(name)]
        if node.op in _ENDS:
            return []
        inputs = data_inputs(node)
        return [i for i in inputs if self._passes(i)]

    def _passes(self, name: str) -> bool:
        op = self.step.graph_index.nodes[node_of(name)].op
        return op == "VarHandleOp" or self.step.spec_of(name).dtype.is_floating


_ENDS = having(Trait.SOURCE | Trait.COMPARISON) | {"StopGradient"}
