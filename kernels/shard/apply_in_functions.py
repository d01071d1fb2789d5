"""ApplyInFunctions: applies constraints in the functions of loops, branches and calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from autodist.graph.functions import functions_by_name
from autodist.graph.names import node_of
from autodist.graph.op_types import spelled_outputs
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.annotated import annotated, sharding_of
from autodist.sharding import Annotations, in_function


@dataclass(frozen=True)
class ApplyInFunctions(Kernel[CapturedStep, CapturedStep]):
    """Does in functions what `TakeSharding` and `ReadConstraint` do in the step.

    An argument of a loop stays free, and the other nodes of the body that read it read its closed constraint.
    """

    name: ClassVar[str] = "apply-in-functions"

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        annotations = annotated(step)
        inside = [name for name in annotations.constraints if "@" in name] if annotations else []
        if annotations is None or not inside:
            return step
        editor = StepEditor(step)
        definitions = functions_by_name(editor.library)
        is_rewired = False
        tensors = dict(annotations.tensors)
        for name in inside:
            function, _, node = name.partition("@")
            operand = _Operand.of(definitions[function], node)
            one, known = annotations.constraints[name], in_function(function, operand.name)
            edge = next((edge for edge in annotations.edges if known in edge.targets), None)
            is_free = sharding_of(annotations, known) is None and (edge is None or edge.sharding is None)
            if not is_free or not one.sharding.is_closed or operand.is_constrained_otherwise(annotations, node):
                continue
            if edge is None:
                tensors.setdefault(known, one)
            else:
                is_rewired |= operand.let_read(node, annotations)
        if not is_rewired and tensors == annotations.tensors:
            return step
        made = replace(annotations, tensors=tensors)
        return editor.to_step(annotations=made) if is_rewired else replace(step, annotations=made)


@dataclass(frozen=True)
class _Operand:
    """The operand of a constraint in a function.

    Attributes:
        definition: of the function.
        spelled: the tensor as nodes of the function spell it.
        name: the tensor as a node of a graph spells it.
    """

    definition: Any
    spelled: str
    name: str

    @classmethod
    def of(cls, definition: Any, constraint: str) -> _Operand:
        nodes = {node.name: node for node in definition.node_def}
        spelled = nodes[constraint].input[0]
        source, _, output = spelled.partition(":")
        index = spelled_outputs(nodes[source]).index(output) if output else 0
        return cls(definition, spelled, f"{source}:{index}")

    @property
    def readers(self) -> Mapping[str, Any]:
        """The nodes of the function that read the operand, by name."""
        return {node.name: node for node in self.definition.node_def if self.spelled in node.input}

    def is_constrained_otherwise(self, annotations: Annotations, constraint: str) -> bool:
        """Returns True if another constraint requests another sharding of the operand."""
        function = self.definition.signature.name
        found = [annotations.constraints.get(in_function(function, name)) for name in self.readers]
        own = annotations.constraints[in_function(function, constraint)]
        return any(one is not None and one.sharding != own.sharding for one in found)

    def let_read(self, constraint: str, annotations: Annotations) -> bool:
        """Lets the readers on which a constraint does not depend read it; returns True if there are any."""
        sources = {n.name: [node_of(i) for i in n.input] for n in self.definition.node_def}
        before = reach([constraint], lambda name: sources.get(name, ()))
        function, is_rewired = self.definition.signature.name, False
        for name, node in self.readers.items():
            if name not in before and in_function(function, name) not in annotations.constraints:
                rewired = [f"{constraint}:output:0" if i == self.spelled else i for i in node.input]
                is_rewired |= rewired != list(node.input)
                node.input[:] = rewired
        return is_rewired
