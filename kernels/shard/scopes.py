"""Scopes: the graph of a step and the functions that it calls, as places of tensors with names of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.layout.bodies import Library
from autodist.sharding import in_function

_IDENTITIES = having(Trait.IDENTITY | Trait.ENTER | Trait.SWITCH)


@dataclass(frozen=True)
class Scope:
    """The nodes of a step, or those of a function.

    Attributes:
        function: the function; None: the step.
        nodes: by name.
        spec_of: returns shape and dtype of a tensor of these nodes.
        variables: the variable of each handle node: a VarHandleOp, or an argument of the function.
        arguments: the arguments of the function.
        results: the results of the function.
    """

    function: str | None
    nodes: Mapping[str, NodeDef]
    spec_of: Callable[[str], tf.TensorSpec]
    variables: Mapping[str, str]
    arguments: Sequence[str] = ()
    results: Sequence[str] = ()

    def named(self, name: str) -> str:
        """Returns the name of a tensor of these nodes that is unique in the step."""
        return tensor(name) if self.function is None else in_function(self.function, tensor(name))

    def variable_of(self, name: str) -> str | None:
        """Returns the variable whose handle a tensor is; None if it is no handle."""
        node = self.nodes[node_of(name)]
        while node.name not in self.variables:
            if node.op not in _IDENTITIES:
                return None
            node = self.nodes[node_of(node.input[0])]
        return self.variables[node.name]


class Scopes:
    """The scopes of a step; the body of a function is made once, for the shapes of its first call."""

    def __init__(self, step: CapturedStep) -> None:
        self._library = Library(step.graph_def.library)
        variables = {variable.handle: variable.name for variable in step.variables}
        self.step = Scope(None, step.graph_index.nodes, step.spec_of, variables)
        self._nodes_of = {v.name: step.graph_index.nodes[v.handle] for v in step.variables}
        self.variable_specs = {v.name: tf.TensorSpec(v.shape, v.dtype) for v in step.variables}
        self._functions: dict[str, Scope] = {}

    def has(self, function: str) -> bool:
        return self._library.has(function)

    def function(self, name: str, caller: Scope, arguments: Sequence[str]) -> Scope:
        """Returns the scope of a function that is called with tensors of another scope."""
        if name not in self._functions:
            variables = [caller.variable_of(argument) for argument in arguments]
            handles = [self._nodes_of[variable] if variable else None for variable in variables]
            body = self._library.body(name, [caller.spec_of(one).shape for one in arguments], handles)
            of_arguments = zip(body.arguments, variables, strict=True)
            self._functions[name] = Scope(
                name,
                body.index.nodes,
                lambda t: body.specs_of(node_of(t))[int(tensor(t).partition(":")[2])],
                {node_of(argument): variable for argument, variable in of_arguments if variable},
                body.arguments,
                body.outputs,
            )
        return self._functions[name]
