"""Removes ops that only forward several tensors (IdentityN), so that no tensor waits for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.editor import GraphEditor
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class SplitBundles(Kernel[CapturedStep, CapturedStep]):
    """Removes ops that only bundle tensors (IdentityN), which tie each variable's update to every gradient.

    g1, g2 → IdentityN → update1, update2      becomes      g1 → update1,  g2 → update2
    """

    name: ClassVar[str] = "split-bundles"
    after: ClassVar[Mapping[str, str]] = {
        "inline-branches": "no other kernel looks into branches",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        bundles = [node.name for node in step.graph_index.of_op("IdentityN")]
        if not bundles:
            return step
        editor = StepEditor(step)
        replaced = {t: t for t in (*step.outputs, *(t for g in step.gradients for t in g.tensors))}
        for name in bundles:
            _unbundle(editor, name)
        for t in replaced:
            while (node := editor[node_of(replaced[t])]).op == "IdentityN":
                replaced[t] = tensor(node.input[output_index(replaced[t])])
        editor.set_outputs(replaced[t] for t in step.outputs)
        gradients = tuple(replace(g, tensors=tuple(replaced[t] for t in g.tensors)) for g in step.gradients)
        named = editor.named(gradients=gradients)
        editor.remove_unread(bundles, lambda node: node.name in named)
        return editor.to_step(gradients=gradients)


def _unbundle(editor: GraphEditor, name: str) -> None:
    bundle = editor[name]
    data = [i for i in bundle.input if not is_control(i)]
    control = [i for i in bundle.input if is_control(i)]
    for consumer in editor.consumers(name):
        inputs = []
        for i in editor[consumer].input:
            if node_of(i) != name:
                inputs.append(i)
            elif is_control(i):
                inputs += [f"^{node_of(d)}" for d in data] + control
            else:
                inputs += [data[output_index(i)]]
                inputs += control
        editor.set_inputs(consumer, [*(i for i in inputs if not is_control(i)), *filter(is_control, inputs)])
