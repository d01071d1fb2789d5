"""Ties: the tensors through which control flow and variables pass a value on unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.graph.control_flow import V1_CONTROL_FLOW
from autodist.graph.editor import NodeDef
from autodist.graph.functions import branches_of
from autodist.graph.names import data_inputs, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.kernels.shard.scopes import Scope, Scopes

_LOOPS, _BRANCHES, _CALLS = (having(trait) for trait in (Trait.LOOP, Trait.BRANCH, Trait.CALL))
_READS, _ASSIGNMENTS = having(Trait.READ), having(Trait.ASSIGNMENT)
_SWITCHES = having(Trait.SWITCH)

LIST = "a list of tensors"


@dataclass
class Tie:
    """Sources and targets of one value.

    Attributes:
        sources: the tensors whose values flow in.
        targets: the tensors that have these values.
        owner: the variable; None: control flow.
    """

    sources: list[str]
    targets: list[str]
    owner: str | None = None


@dataclass
class FlowTies:
    """Finds the ties of a step and of the functions that it calls.

    Attributes:
        ties: those found.
        whole: tensors without a tie, which stay whole, with the reason.
    """

    scopes: Scopes
    ties: list[Tie] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _of_variable: dict[str | None, Tie] = field(default_factory=dict)

    @classmethod
    def of(cls, step: CapturedStep) -> FlowTies:
        found = cls(Scopes(step))
        variables = [v for v in step.variables if v.shape and v.dtype not in (tf.resource, tf.variant, tf.string)]
        found._of_variable.update((v.name, Tie([], [], v.name)) for v in variables)
        found.ties += found._of_variable.values()
        found._visit(found.scopes.step)
        return found

    def _visit(self, scope: Scope) -> None:
        for node in list(scope.nodes.values()):
            if node.op in _LOOPS:
                self._loop(scope, node)
            elif node.op in _BRANCHES:
                self._branches(scope, node)
            elif node.op in _CALLS or self.scopes.has(node.op):
                function = node.op if self.scopes.has(node.op) else node.attr["f"].func.name
                self._call(scope, node, [function], data_inputs(node))
            elif node.op == "ReadVariableOp":
                tie = self._of_variable.get(scope.variable_of(node.input[0]))
                if tie:
                    tie.targets.append(scope.named(node.name))
            elif node.op not in V1_CONTROL_FLOW:
                self._writes(scope, node)
        self._old_flow(scope)

    def _loop(self, scope: Scope, node: NodeDef) -> None:
        inputs = data_inputs(node)
        body, condition = (self._enter(node.attr[key].func.name, scope, inputs) for key in ("body", "cond"))
        for k, name in enumerate(inputs):
            result, argument, shown = body.results[k], body.arguments[k], condition.arguments[k]
            self._tie(
                (scope, [name]),
                (body, [result]),
                into=[(scope, f"{node.name}:{k}"), (body, argument), (condition, shown)],
            )

    def _branches(self, scope: Scope, node: NodeDef) -> None:
        self._call(scope, node, branches_of(node), data_inputs(node)[1:])

    def _call(self, scope: Scope, node: NodeDef, functions: Iterable[str], inputs: list[str]) -> None:
        bodies = [self._enter(name, scope, inputs) for name in functions]
        for k, name in enumerate(inputs):
            self._tie((scope, [name]), into=[(body, body.arguments[k]) for body in bodies])
        for k, _ in enumerate(bodies[0].results):
            results = [(body, [body.results[k]]) for body in bodies]
            self._tie(*results, into=[(scope, f"{node.name}:{k}")])

    def _enter(self, function: str, scope: Scope, arguments: list[str]) -> Scope:
        """Returns the scope of a function; visits it on the first call."""
        found = self.scopes.function(function, scope, arguments)
        if function not in self._seen:
            self._seen.add(function)
            self._visit(found)
        return found

    def _tie(self, *sources: tuple[Scope, list[str]], into: list[tuple[Scope, str]]) -> None:
        """Adds a tie, unless no sharding can propagate through it."""
        scope, first = into[0]
        spec = scope.spec_of(first)
        if spec.dtype == tf.variant:
            self.whole[scope.named(first)] = LIST
        elif spec.shape.rank and spec.dtype not in (tf.resource, tf.string):
            named = [of.named(name) for of, names in sources for name in names]
            self.ties.append(Tie(named, [of.named(name) for of, name in into]))

    def _writes(self, scope: Scope, node: NodeDef) -> None:
        """Adds the tensors of a variable's shape that a node writes to it."""
        inputs = data_inputs(node)
        written = [variable for name in inputs if (variable := scope.variable_of(name))]
        for variable in written if node.op not in _READS else ():
            tie = self._of_variable.get(variable)
            values = inputs[1:2] if node.op in _ASSIGNMENTS else [i for i in inputs if not scope.variable_of(i)]
            if tie:
                tie.sources += [scope.named(i) for i in values if self._is_like(scope, i, variable)]

    def _is_like(self, scope: Scope, name: str, variable: str) -> bool:
        """Returns True if a tensor has the shape and the dtype of a variable."""
        spec = scope.spec_of(name)
        known = self.scopes.variable_specs[variable]
        return (
            spec.dtype == known.dtype
            and spec.shape.rank == known.shape.rank
            and spec.shape.is_compatible_with(known.shape)
        )

    def _old_flow(self, scope: Scope) -> None:
        """Adds a tie for each value that passes nodes of TensorFlow 1 loops and branches."""
        leader: dict[str, str] = {}

        def find(name: str) -> str:
            while leader[name] != name:
                name = leader[name]
            return name

        flows = [node for node in scope.nodes.values() if node.op in V1_CONTROL_FLOW]
        for node in flows:
            leader[node.name] = node.name
        for node in flows:
            for name in self._values(scope, node):
                if node_of(name) in leader:
                    leader[find(node.name)] = find(node_of(name))
        groups: dict[str, list[NodeDef]] = {}
        for node in flows:
            groups.setdefault(find(node.name), []).append(node)
        for group in groups.values():
            own = {node.name for node in group}
            sources = [name for node in group for name in self._values(scope, node) if node_of(name) not in own]
            targets = [f"{node.name}:{k}" for node in group for k in range(2 if node.op in _SWITCHES else 1)]
            self._tie((scope, sources), into=[(scope, name) for name in targets])

    @staticmethod
    def _values(scope: Scope, node: NodeDef) -> list[str]:
        """Returns the tensors whose values a node of TensorFlow 1 control flow passes on."""
        inputs = data_inputs(node)
        return inputs[:1] if node.op in _SWITCHES else inputs
