"""Functions that compute nodes of a graph, and calls that replace these nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.functions import add_function
from autodist.graph.names import as_input, is_control, node_of
from autodist.graph.op_types import spelled_outputs, types_of_inputs, types_of_outputs
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.communicate.buckets import digest

NameInFunction = Callable[[int, str], str]
"""Returns the name of a node in a function from its position and its name in the graph."""


@dataclass(frozen=True)
class CalledFunction:
    """A function, and the tensors of one call.

    Attributes:
        definition: a FunctionDef; equal nodes have the same one, with different arguments.
        arguments: the inputs of the call.
        results: the tensors that the outputs of the call replace.
    """

    definition: Any
    arguments: tuple[str, ...]
    results: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.definition.signature.name)

    def on(self, replacements: Mapping[str, str]) -> CalledFunction:
        """Returns the call with some of its arguments replaced."""
        return replace(self, arguments=tuple(replacements.get(name, name) for name in self.arguments))


def compiled_function(
    nodes: Sequence[NodeDef], results: Sequence[str] = (), name_in_function: NameInFunction = "node_{0}".format
) -> CalledFunction:
    """Creates a function of nodes for XLA to compile; its writes of variables run on each call.

    Args:
        nodes: the nodes in topological order. Tensors of other nodes that they read become arguments.
        results: the tensors of these nodes that the function returns.
        name_in_function: returns the name of a node in the function; equal nodes should have equal names.
    """
    made = _build(nodes, results, name_in_function)
    made.definition.signature.is_stateful = True
    made.definition.attr["_XlaMustCompile"].b = True
    return made.to_call("autodist_compiled", results)


def shared_function(
    nodes: Sequence[NodeDef], results: Sequence[str], name_in_function: NameInFunction
) -> CalledFunction:
    """Creates a function of stateless nodes; the arguments are those of `compiled_function`."""
    return _build(nodes, results, name_in_function).to_call("autodist_shared", results)


def _build(nodes: Sequence[NodeDef], results: Sequence[str], name_in_function: NameInFunction) -> _Function:
    made = _Function(nodes, name_in_function)
    for node in nodes:
        made.add(node)
    for name in results:
        made.add_result(name)
    return made


class _Function:
    """A FunctionDef under construction."""

    def __init__(self, nodes: Sequence[NodeDef], name_in_function: NameInFunction) -> None:
        self.definition: Any = tf.compat.v1.GraphDef().library.function.add()
        self.names = {node.name: name_in_function(k, node.name) for k, node in enumerate(nodes)}
        self.inside: dict[str, tuple[str, int]] = {}
        self.arguments: dict[str, str] = {}

    def add(self, node: NodeDef) -> None:
        short_name = self.names[node.name]
        copy = self.definition.node_def.add(name=short_name, op=node.op)
        for key, value in node.attr.items():
            if not key.startswith("_"):
                copy.attr[key].CopyFrom(value)
        data = [as_input(i) for i in node.input if not is_control(i)]
        for spelling, kind in zip(data, types_of_inputs(node), strict=True):
            copy.input.append(self._taken(spelling, kind))
        waits = (node_of(i) for i in node.input if is_control(i))
        copy.input.extend(dict.fromkeys(f"^{self.names[name]}" for name in waits if name in self.names))
        outputs = list(zip(spelled_outputs(node), types_of_outputs(node), strict=True))
        self.inside.update(
            {as_input(f"{node.name}:{k}"): (f"{short_name}:{output}", kind) for k, (output, kind) in enumerate(outputs)}
        )
        if not outputs and node.op != "NoOp":
            self.definition.signature.control_output.append(short_name)
            self.definition.control_ret[short_name] = short_name

    def _taken(self, spelling: str, kind: int) -> str:
        if spelling in self.inside:
            return self.inside[spelling][0]
        if spelling not in self.arguments:
            self.arguments[spelling] = f"argument_{len(self.arguments)}"
            self.definition.signature.input_arg.add(name=self.arguments[spelling], type=kind)
        return self.arguments[spelling]

    def add_result(self, name: str) -> None:
        output, kind = self.inside[as_input(name)]
        result = f"result_{len(self.definition.ret)}"
        self.definition.signature.output_arg.add(name=result, type=kind)
        self.definition.ret[result] = output

    def to_call(self, prefix: str, results: Sequence[str]) -> CalledFunction:
        """Returns the function, named by a digest of its content; `_noinline` keeps TensorFlow from inlining it."""
        self.definition.attr["_noinline"].b = True
        content = self.definition.SerializeToString(deterministic=True)
        self.definition.signature.name = f"{prefix}_{digest(content.hex())}"
        return CalledFunction(self.definition, tuple(self.arguments), tuple(results))


def replace_by_call(editor: StepEditor[Step], name: str, region: Sequence[str], function: CalledFunction) -> None:
    """Replaces the nodes `region` by a call of the function made of them.

    The call has all their control inputs, and nodes that waited for one of them wait for the call.
    """
    inside = frozenset(region)
    add_function(editor.library, function.definition)
    before = [i for member in region for i in editor[member].input if is_control(i) and node_of(i) not in inside]
    call = editor.add(call_node(name, editor[region[-1]].device, function, before))
    outputs = {as_input(result): f"{call}:{k}" for k, result in enumerate(function.results)}
    for result in function.results:
        editor.replace_output(result, outputs[as_input(result)])
    for reader in dict.fromkeys(c for member in region for c in editor.consumers(member) if c not in inside):
        editor.set_inputs(reader, [_replaced(i, inside, outputs, call) for i in editor[reader].input])
    editor.replace_targets(dict.fromkeys(region, (call,)))
    editor.remove(reversed(region))


def _replaced(spelling: str, inside: Collection[str], outputs: Mapping[str, str], call: str) -> str:
    if is_control(spelling):
        return f"^{call}" if node_of(spelling) in inside else spelling
    return outputs.get(as_input(spelling), spelling)


def call_node(name: str, device: str, function: CalledFunction, before: Iterable[str]) -> NodeDef:
    """Returns a node that calls a function after the nodes `before`, given as control inputs."""
    signature = function.definition.signature
    node = NodeDef(
        name=name, op="StatefulPartitionedCall" if signature.is_stateful else "PartitionedCall", device=device
    )
    node.input[:] = [*function.arguments, *dict.fromkeys(before)]
    node.attr["f"].func.name = function.name
    node.attr["Tin"].list.type[:] = [argument.type for argument in signature.input_arg]
    node.attr["Tout"].list.SetInParent()
    node.attr["Tout"].list.type[:] = [result.type for result in signature.output_arg]
    if "_XlaMustCompile" in function.definition.attr:
        node.attr["_XlaMustCompile"].b = True
    else:
        node.attr["config_proto"].s = _OPTIMIZED_BEFORE
    return node


def _optimized_before() -> bytes:
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString(deterministic=True)


_OPTIMIZED_BEFORE = _optimized_before()
"""The session's optimizer, if enabled, also optimizes functions; without this, each call would repeat that."""
