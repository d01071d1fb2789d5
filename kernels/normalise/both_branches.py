"""Both branches: an `If` that writes variables is replaced by arithmetic and one write per variable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.branch_effects import first_effect, nodes_in_branches
from autodist.graph.editor import NodeDef
from autodist.graph.effects import QUERIES
from autodist.graph.functions import branches_of, functions_by_name
from autodist.graph.index import GraphIndex
from autodist.graph.names import data_inputs, is_control, node_of, output_index, tensor
from autodist.graph.op_types import is_in_batches
from autodist.graph.step import CapturedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.normalise.variable_versions import WRITES, Arithmetic, VariableVersion
from autodist.layout.bodies import Body, Library

_State = dict[str, VariableVersion]
"""Versions of variables, by handle."""


@dataclass(frozen=True)
class Taken:
    """The replacement of an `If` whose two branches were added to the graph.

    Attributes:
        reads: the read of each variable that the `If` accesses, by handle.
        writes: the writes of each variable that it writes, by handle, in order.
        outputs: the tensors that replace its used outputs, by the names of these.
    """

    reads: Mapping[str, str]
    writes: Mapping[str, Sequence[str]]
    outputs: Mapping[str, str]


def find_hindrance(node: NodeDef, library: tf.compat.v1.FunctionDefLibrary) -> str | None:
    """Returns the reason why both branches of an `If` cannot be computed; None if they can.

    Side effects of a branch other than writes of variables (printing, stateful random draws, assertions) must happen
    only if the branch is taken. This also holds for writes by other ops than `WRITES`.
    """
    functions = functions_by_name(library)
    for choice in (node, *(n for n in nodes_in_branches(node, functions) if n.op == "If")):
        if choice.attr["Tcond"].type != tf.bool.as_datatype_enum:
            return f"a condition that is not boolean ({choice.name})"
        if tf.resource.as_datatype_enum in choice.attr["Tout"].list.type:
            return f"a resource as an output ({choice.name})"
    effect = first_effect(node, functions, _is_supported)
    return None if effect is None else f"{effect.op} ({effect.name})"


def _is_supported(node: NodeDef) -> bool:
    is_gather = node.op == "ResourceGather" and not is_in_batches(node)
    return is_gather or node.op in ("ReadVariableOp", *WRITES, *QUERIES)


class BothBranches:
    """Adds both branches of an `If` to the graph: the predicate selects between their written values.

        If(p, {m ← f(m, g); v ← v - m}, {c ← c + 1})    becomes    m₁ = f(m, g);  m ← where(p, m₁, m);
                                                                  v ← where(p, v - m₁, v);  c ← where(p, c, c + 1)

    Within a branch, a read returns the value that the branch has written before.
    """

    def __init__(self, editor: StepEditor[Step], step: CapturedStep) -> None:
        self._editor, self._step = editor, step
        self._library = Library(editor.library)
        self._arithmetic = Arithmetic(editor)

    def take(self, node: NodeDef) -> Taken:
        """Adds the replacement of an `If`; the `If`, its consumers and their control dependencies remain unchanged."""
        prefix = f"branches/{node.name}"
        predicate, *captures = data_inputs(node)
        variables = {
            node_of(g): self._step.by_handle[node_of(g)] for g in captures if node_of(g) in self._step.by_handle
        }
        waits = {h: self._waits(node, h) for h in variables}
        before = {h: self._arithmetic.read(f"{prefix}/{h}", variable, waits[h]) for h, variable in variables.items()}
        outputs, after = self._choose(node, prefix, predicate, captures, before, self._outputs_read(node.name))
        reads = {h: node_of(version.value) for h, version in before.items()}
        writes = {
            h: self._arithmetic.write(f"{prefix}/{h}", variable, before[h], after[h], [*waits[h], reads[h]])
            for h, variable in variables.items() if after[h] != before[h]
        }  # fmt: skip
        used = {h: read for h, read in reads.items() if not self._drop_if_unused(read, waits[h])}
        return Taken(used, writes, {f"{node.name}:{k}": made for k, made in outputs.items()})

    def _drop_if_unused(self, read: str, waits: Sequence[str]) -> bool:
        """Removes a read whose value is unused, such as for rows that are only added; returns True if it did."""
        readers = [self._editor[consumer] for consumer in self._editor.consumers(read)]
        if _outputs_among(read, _data_of(readers)):
            return False
        self._editor.replace_control(read, waits)
        self._editor.remove([read])
        return True

    def _waits(self, node: NodeDef, handle: str) -> list[str]:
        """Returns the nodes that an `If` waits for on behalf of one variable; plain reads of others order nothing."""
        return [name for i in node.input if is_control(i) and not self._is_plain_read(name := node_of(i), handle)]

    def _is_plain_read(self, name: str, handle: str) -> bool:
        node = self._editor[name]
        return node.op == "ReadVariableOp" and len(node.input) == 1 and node_of(node.input[0]) != handle

    def _outputs_read(self, name: str) -> set[int]:
        readers = [self._editor[consumer] for consumer in self._editor.consumers(name)]
        return _outputs_among(name, [*_data_of(readers), *self._step.outputs])

    def _choose(
        self, node: NodeDef, prefix: str, predicate: str, captures: Sequence[str], before: _State, wanted: set[int]
    ) -> tuple[dict[int, str], _State]:
        """Returns the outputs of an `If` in `wanted`, and the versions of variables after it."""
        then, other = (
            self._run(self._body(branch, captures), f"{prefix}/{role}_branch", captures, before)
            for role, branch in zip(("then", "else"), branches_of(node), strict=True)
        )
        select, either = self._arithmetic.select, self._arithmetic.either
        outputs = {k: select(f"{prefix}/output_{k}", predicate, then[0][k], other[0][k]) for k in sorted(wanted)}
        return outputs, {h: either(f"{prefix}/{h}/after", predicate, then[1][h], other[1][h]) for h in before}

    def _body(self, function: str, captures: Sequence[str]) -> Body:
        made_by = [self._editor[node_of(g)] for g in captures]
        handles = [node.name in self._step.by_handle for node in made_by]
        nodes = [
            node if is_handle or (node.op == "Const" and tf.as_dtype(node.attr["dtype"].type).is_integer) else None
            for node, is_handle in zip(made_by, handles, strict=True)
        ]
        shapes = [
            tf.TensorShape([]) if is_handle else self._editor.spec(g).shape
            for g, is_handle in zip(captures, handles, strict=True)
        ]
        return self._library.body(function, shapes, nodes)

    # -- one branch ------------------------------------------------------------------------------------------------

    def _run(self, body: Body, prefix: str, captures: Sequence[str], before: _State) -> tuple[list[str], _State]:
        """Adds the nodes of a branch; returns its outputs and the versions of variables after it."""
        tensors = dict(zip(body.arguments, captures, strict=True))
        state = dict(before)
        graph_index = GraphIndex(body.graph_def)
        for name in graph_index.order:
            node, scope = graph_index.nodes[name], f"{prefix}/{name}"
            inputs = [tensors[i] for i in data_inputs(node)]
            handle = node_of(inputs[0]) if inputs else ""
            if tensor(name) in body.arguments:
                continue
            if node.op == "If":
                readers = [graph_index.nodes[consumer] for consumer in graph_index.consumers[name]]
                wanted = _outputs_among(name, [*_data_of(readers), *body.outputs])
                chosen, state = self._choose(node, scope, inputs[0], inputs[1:], state, wanted)
                tensors.update({f"{name}:{k}": made for k, made in chosen.items()})
            elif node.op in WRITES:
                state[handle] = self._arithmetic.written(scope, node.op, state[handle], inputs[1:])
            elif node.op == "ReadVariableOp":
                tensors[tensor(name)] = self._arithmetic.whole(scope, state[handle])
            elif node.op == "ResourceGather":
                tensors[tensor(name)] = self._arithmetic.gathered(scope, state[handle], inputs[1])
            elif node.op == "IdentityN":  # a copy would tie variables together
                tensors.update({f"{name}:{k}": passed for k, passed in enumerate(inputs)})
            else:
                outputs = self._arithmetic.copy(scope, node, inputs, body.specs_of(name))
                tensors.update({f"{name}:{k}": made for k, made in enumerate(outputs)})
        return [tensors[output] for output in body.outputs], state


def _data_of(nodes: Iterable[NodeDef]) -> Iterator[str]:
    return (i for node in nodes for i in node.input if not is_control(i))


def _outputs_among(name: str, tensors: Iterable[str]) -> set[int]:
    """Returns the indices of a node's outputs that are among some tensors."""
    return {output_index(t) for t in tensors if node_of(t) == name}
