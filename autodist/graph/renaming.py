"""Renaming: a step under the names that another process has for the same nodes and variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import tensorflow as tf

from autodist.graph.names import renamed, tensor
from autodist.graph.step import CapturedStep

_COLOCATED = b"loc:@"


@dataclass(frozen=True)
class Renaming:
    """Maps this worker's names to the chief's; a missing name is the same on both.

    Attributes:
        nodes: of nodes.
        variables: of variables.
    """

    nodes: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.variables)

    def variable(self, name: str) -> str:
        return self.variables.get(name, name)

    def node(self, name: str) -> str:
        return self.nodes.get(name, name)

    def tensor(self, name: str) -> str:
        """Returns the chief's name of a tensor or of an input of a node."""
        return renamed(name, self.nodes)

    def step(self, step: CapturedStep) -> CapturedStep:
        """Returns a captured step under the chief's names."""
        if not self:
            return step
        inverse = {theirs: name for name, theirs in self.nodes.items()}
        back = Renaming(inverse)
        calls = tuple(
            replace(
                call, targets=self._tensors(call.targets), seed=self.node(call.seed),
                terms=tuple(
                    replace(t, tensor=self.tensor(t.tensor), seed=self.node(t.seed), value=self.node(t.value))
                    for t in call.terms
                ),
            )
            for call in step.gradient_calls
        )  # fmt: skip
        gradients = (
            replace(g, variable=self.variable(g.variable), tensors=self._tensors(g.tensors)) for g in step.gradients
        )
        sums = (replace(s, node=self.node(s.node), of=s.of and self.node(s.of)) for s in step.in_step_all_reduces)
        variables = (replace(v, name=self.variable(v.name), handle=self.node(v.handle)) for v in step.variables)
        return replace(
            step,
            graph_def=self._graph(step.graph_def),
            variables=tuple(variables),
            gradients=tuple(gradients),
            gradient_calls=calls,
            in_step_all_reduces=tuple(sums),
            inputs={self.tensor(name): axis for name, axis in step.inputs.items()},
            apart={self.tensor(name): self.tensor(by) for name, by in step.apart.items()},
            outputs=self._tensors(step.outputs),
            targets=tuple(map(self.node, step.targets)),
            holders={self.variable(name): holder for name, holder in step.holders.items()},
            noted=lambda name: step.spec_of(back.tensor(tensor(name))),
            origin_of=lambda name: step.origin_of(back.node(name)),
        )

    def _tensors(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self.tensor, names))

    def _graph(self, graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
        result = tf.compat.v1.GraphDef()
        result.CopyFrom(graph_def)
        for node in result.node:
            node.name = self.node(node.name)
            node.input[:] = map(self.tensor, list(node.input))
            if "_class" in node.attr:
                classes = node.attr["_class"].list.s
                classes[:] = [self._colocated(one) for one in list(classes)]
        return result

    def _colocated(self, group: bytes) -> bytes:
        name = group.removeprefix(_COLOCATED).decode()
        return _COLOCATED + self.node(name).encode() if group.startswith(_COLOCATED) else group
