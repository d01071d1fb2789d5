"""Settlement of losses: removes decomposition points of a loss that needs a single weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.editor import GraphEditor
from autodist.graph.flows import flows_of
from autodist.graph.loss_terms import find_terms
from autodist.graph.names import node_of, tensor
from autodist.graph.parts import Term
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.unused import remove_unused


@dataclass(frozen=True)
class SettleLosses(Kernel[CapturedStep, CapturedStep]):
    """Keeps the decomposition points of a loss at its terms and removes all others; gradient calls keep these terms.

    mean' = value(seed · mean),  0.5 * mean' → 0.5 * seed · …      becomes      0.5 * mean → 0.5 * …
    """

    name: ClassVar[str] = "settle-losses"
    after: ClassVar[Mapping[str, str]] = {
        "inline-branches": "no other kernel looks into branches",
        "split-bundles": "gradients and updates are distinct nodes from there on",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if not any(call.terms for call in step.gradient_calls):
            return step
        flows = None if context.single_replica else step.flows or flows_of(step)
        editor = StepEditor(step)
        calls = []
        for call in step.gradient_calls:
            kept = find_terms(step, flows, call) if flows is not None else []
            for term in call.terms:
                if term not in kept:
                    _remove_scaling(editor, step, term)
            calls.append(replace(call, terms=tuple(replace(term, parts=()) for term in kept), is_settled=True))
        points = [name for call in step.gradient_calls for term in call.terms for name in (term.value, term.seed)]
        remove_unused(editor, step.named, points)
        return editor.to_step(gradient_calls=tuple(calls))


def _remove_scaling(editor: GraphEditor, step: CapturedStep, term: Term) -> None:
    """Makes all consumers read the unscaled value, and lets gradients pass without a weight."""
    if term.value in editor:
        scaled = node_of(editor[term.value].input[0])
        editor.rewire(tensor(term.value), editor[scaled].input[0])
    if term.seed not in editor:
        return
    for name in sorted(editor.consumers(term.seed)):
        factors = [i for i in editor[name].input if node_of(i) != term.seed]
        if editor[name].op == "Mul" and len(factors) == 1 and name not in step.named:
            editor.rewire(tensor(name), factors[0])
    editor.rewire(tensor(term.seed), tensor(editor[term.seed].input[0]))
