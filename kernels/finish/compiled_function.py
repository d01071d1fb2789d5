"""Functions for XLA to compile, and their calls in the place of the nodes that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, is_control, node_of
from autodist.graph.op_types import spelled_outputs, types_of_inputs, types_of_outputs
from autodist.graph.step_editor import StepEditor
from autodist.kernels.communicate.buckets import digest


@dataclass(frozen=True)
class CompiledFunction:
    """What to call, and on what.

    Attributes:
        definition: a FunctionDef; nodes that do the same have the same one, and differ in their arguments.
        arguments: inputs of the call.
        results: the tensors that stand for the outputs of the call.
    """

    definition: Any
    arguments: tuple[str, ...]
    results: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.definition.signature.name)


def compiled_function(
    nodes: Sequence[NodeDef], results: Sequence[str] = (), short: Callable[[int, str], str] = "node_{0}".format
) -> CompiledFunction:
    """Makes a function of nodes; what writes variables among them runs whenever it is called.

    Args:
        nodes: each after what it needs of the others. What they read of other nodes becomes arguments.
        results: tensors of theirs that it returns.
        short: what a node is called in it, by its position and its name; nodes that do the same should be called the
            same.
    """
    made = _Function(nodes, short)
    for node in nodes:
        made.add(node)
    for name in results:
        made.give(name)
    signature = made.definition.signature
    signature.is_stateful = True
    made.definition.attr["_XlaMustCompile"].b = True
    made.definition.attr["_noinline"].b = True
    signature.name = f"autodist_compiled_{digest(made.definition.SerializeToString(deterministic=True).hex())}"
    return CompiledFunction(made.definition, tuple(made.arguments), tuple(results))


class _Function:
    """A FunctionDef that is being made."""

    def __init__(self, nodes: Sequence[NodeDef], short: Callable[[int, str], str]) -> None:
        self.definition: Any = tf.compat.v1.GraphDef().library.function.add()
        self.short = {node.name: short(k, node.name) for k, node in enumerate(nodes)}
        self.inside: dict[str, tuple[str, int]] = {}
        self.arguments: dict[str, str] = {}

    def add(self, node: NodeDef) -> None:
        own = self.short[node.name]
        copy = self.definition.node_def.add(name=own, op=node.op)
        for key, value in node.attr.items():
            if not key.startswith("_"):
                copy.attr[key].CopyFrom(value)
        data = [as_input(i) for i in node.input if not is_control(i)]
        for spelling, kind in zip(data, types_of_inputs(node), strict=True):
            copy.input.append(self._taken(spelling, kind))
        waits = (node_of(i) for i in node.input if is_control(i))
        copy.input.extend(dict.fromkeys(f"^{self.short[name]}" for name in waits if name in self.short))
        outputs = list(zip(spelled_outputs(node), types_of_outputs(node), strict=True))
        self.inside.update(
            {as_input(f"{node.name}:{k}"): (f"{own}:{output}", kind) for k, (output, kind) in enumerate(outputs)}
        )
        if not outputs and node.op != "NoOp":
            self.definition.signature.control_output.append(own)
            self.definition.control_ret[own] = own

    def _taken(self, spelling: str, kind: int) -> str:
        if spelling in self.inside:
            return self.inside[spelling][0]
        if spelling not in self.arguments:
            self.arguments[spelling] = f"argument_{len(self.arguments)}"
            self.definition.signature.input_arg.add(name=self.arguments[spelling], type=kind)
        return self.arguments[spelling]

    def give(self, name: str) -> None:
        output, kind = self.inside[as_input(name)]
        result = f"result_{len(self.definition.ret)}"
        self.definition.signature.output_arg.add(name=result, type=kind)
        self.definition.ret[result] = output


def put_call(editor: StepEditor, name: str, region: Sequence[str], function: CompiledFunction) -> None:
    """Puts a call of a function, made of the nodes `region`, in their place.

    The call waits for all that one of them waited for, and what waited for one of them waits for the call.
    """
    inside = frozenset(region)
    if function.name not in {known.signature.name for known in editor.library.function}:
        editor.library.function.append(function.definition)
    before = [i for member in region for i in editor[member].input if is_control(i) and node_of(i) not in inside]
    call = editor.add(_call(name, editor[region[-1]].device, function, before))
    for k, result in enumerate(function.results):
        editor.rewire(result, f"{call}:{k}", editor.consumers(node_of(result)).difference(inside))
        editor.return_instead(result, f"{call}:{k}")
    for member in region:
        editor.replace_control(member, [call], editor.consumers(member).difference(inside))
        editor.run_instead(member, [call])
    editor.remove(reversed(region))


def _call(name: str, device: str, function: CompiledFunction, before: Iterable[str]) -> NodeDef:
    signature = function.definition.signature
    node = NodeDef(name=name, op="StatefulPartitionedCall", device=device)
    node.input[:] = [*function.arguments, *dict.fromkeys(before)]
    node.attr["f"].func.name = function.name
    node.attr["Tin"].list.type[:] = [argument.type for argument in signature.input_arg]
    node.attr["Tout"].list.SetInParent()
    node.attr["Tout"].list.type[:] = [result.type for result in signature.output_arg]
    node.attr["_XlaMustCompile"].b = True
    return node
