"""Both branches: an `If` that writes variables becomes arithmetic in the graph, and one write for each variable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.effects import QUERIES
from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.op_types import is_in_batches, is_stateless
from autodist.graph.propagation.bodies import Body, Library
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.normalise.variable_versions import WRITES, Arithmetic, VariableVersion

_BRANCHES = ("then_branch", "else_branch")

_State = dict[str, VariableVersion]
"""By handle, what variables are worth."""


@dataclass(frozen=True)
class Taken:
    """What replaces an `If` both of whose branches were taken into the graph.

    Attributes:
        reads: the read of each variable that it touched, by handle.
        writes: the writes of each variable that it wrote, by handle, in their order.
        outputs: the tensors that stand for those of its outputs that are read, by their names.
    """

    reads: Mapping[str, str]
    writes: Mapping[str, Sequence[str]]
    outputs: Mapping[str, str]


def find_hindrance(node: NodeDef, library: tf.compat.v1.FunctionDefLibrary) -> str | None:
    """Why an `If` cannot have both branches computed, for the predicate to choose between; None if it can.

    What a branch does beside writing variables (printing, drawing from a state, stopping the step) must be done only
    where it is taken; so must writes of other ops than `WRITES`.
    """
    functions = {f.signature.name: f for f in library.function}
    found = _choice_hindrance(node)
    for inner in _within(node, functions):
        found = found or (_choice_hindrance(inner) if inner.op == "If" else _op_hindrance(inner))
    return found


def _within(node: NodeDef, functions: Mapping[str, tf.compat.v1.FunctionDef]) -> Iterator[NodeDef]:
    for branch in _BRANCHES:
        for inner in functions[node.attr[branch].func.name].node_def:
            yield inner
            if inner.op == "If":
                yield from _within(inner, functions)


def _choice_hindrance(node: NodeDef) -> str | None:
    if node.attr["Tcond"].type != tf.bool.as_datatype_enum:
        return f"a condition that is no truth value ({node.name})"
    if tf.resource.as_datatype_enum in node.attr["Tout"].list.type:
        return f"a value that is a resource ({node.name})"
    return None


def _op_hindrance(node: NodeDef) -> str | None:
    if node.op in ("ReadVariableOp", *WRITES, *QUERIES):
        return None
    if node.op == "ResourceGather" and not is_in_batches(node):
        return None
    return None if is_stateless(node.op) else f"{node.op} ({node.name})"


class BothBranches:
    """Takes both branches of an `If` into the graph: what they write become values, of which the predicate chooses.

        If(p, {m ← f(m, g); v ← v - m}, {c ← c + 1})    becomes    m₁ = f(m, g);  m ← where(p, m₁, m);
                                                                  v ← where(p, v - m₁, v);  c ← where(p, c, c + 1)

    Within a branch, a read gives the value that the branch has written before it.
    """

    def __init__(self, editor: StepEditor, item: Step) -> None:
        self._editor, self._item = editor, item
        self._library = Library(editor.library)
        self._arithmetic = Arithmetic(editor)

    def take(self, node: NodeDef) -> Taken:
        """Adds what stands for an `If`, which stays as it is, as do those that read it or wait for it."""
        prefix = f"branches/{node.name}"
        predicate, *given = [tensor(i) for i in node.input if not is_control(i)]
        touched = {node_of(g): self._item.by_handle[node_of(g)] for g in given if node_of(g) in self._item.by_handle}
        waits = {h: self._waits(node, h) for h in touched}
        before = {h: self._arithmetic.read(f"{prefix}/{h}", variable, waits[h]) for h, variable in touched.items()}
        outputs, after = self._choose(node, prefix, predicate, given, before, self._outputs_read(node.name))
        reads = {h: node_of(worth.value) for h, worth in before.items()}
        writes = {
            h: self._arithmetic.write(f"{prefix}/{h}", variable, before[h], after[h], [*waits[h], reads[h]])
            for h, variable in touched.items() if after[h] != before[h]
        }  # fmt: skip
        used = {h: read for h, read in reads.items() if not self._is_dropped(read, waits[h])}
        return Taken(used, writes, {f"{node.name}:{k}": made for k, made in outputs.items()})

    def _is_dropped(self, read: str, waits: Sequence[str]) -> bool:
        """Removes a read that nobody computes with, as where rows are added; returns whether it did."""
        readers = [self._editor[consumer] for consumer in self._editor.consumers(read)]
        if _outputs_among(read, _data_of(readers)):
            return False
        self._editor.replace_control(read, waits)
        self._editor.remove([read])
        return True

    def _waits(self, node: NodeDef, handle: str) -> list[str]:
        """What an `If` waits for on behalf of one variable: not for a mere read of another, which orders nothing."""
        return [name for i in node.input if is_control(i) and not self._is_mere_read(name := node_of(i), handle)]

    def _is_mere_read(self, name: str, besides: str) -> bool:
        node = self._editor[name]
        return node.op == "ReadVariableOp" and len(node.input) == 1 and node_of(node.input[0]) != besides

    def _outputs_read(self, name: str) -> set[int]:
        readers = [self._editor[consumer] for consumer in self._editor.consumers(name)]
        return _outputs_among(name, [*_data_of(readers), *self._item.outputs])

    def _choose(
        self, node: NodeDef, prefix: str, predicate: str, given: Sequence[str], before: _State, wanted: set[int]
    ) -> tuple[dict[int, str], _State]:
        """Those outputs of an `If` that are `wanted`, and what variables are worth after it."""
        then, other = (
            self._run(self._body(node.attr[branch].func.name, given), f"{prefix}/{branch}", given, before)
            for branch in _BRANCHES
        )
        select, either = self._arithmetic.select, self._arithmetic.either
        outputs = {k: select(f"{prefix}/output_{k}", predicate, then[0][k], other[0][k]) for k in sorted(wanted)}
        return outputs, {h: either(f"{prefix}/{h}/after", predicate, then[1][h], other[1][h]) for h in before}

    def _body(self, function: str, given: Sequence[str]) -> Body:
        handles = [self._editor[node_of(g)] if node_of(g) in self._item.by_handle else None for g in given]
        shapes = [
            tf.TensorShape([]) if handle else self._editor.spec(g).shape
            for g, handle in zip(given, handles, strict=True)
        ]
        return self._library.body(function, shapes, handles)

    # -- one branch ------------------------------------------------------------------------------------------------

    def _run(self, body: Body, prefix: str, given: Sequence[str], before: _State) -> tuple[list[str], _State]:
        """The outputs of a branch, and what variables are worth after it."""
        named = dict(zip(body.arguments, given, strict=True))
        state = dict(before)
        graph_index = GraphIndex(body.graph_def)
        for name in graph_index.order:
            node, here = graph_index.nodes[name], f"{prefix}/{name}"
            inputs = [named[tensor(i)] for i in node.input if not is_control(i)]
            handle = node_of(inputs[0]) if inputs else ""
            if tensor(name) in body.arguments:
                continue
            if node.op == "If":
                readers = [graph_index.nodes[consumer] for consumer in graph_index.consumers[name]]
                wanted = _outputs_among(name, [*_data_of(readers), *body.outputs])
                chosen, state = self._choose(node, here, inputs[0], inputs[1:], state, wanted)
                named.update({f"{name}:{k}": made for k, made in chosen.items()})
            elif node.op in WRITES:
                state[handle] = self._arithmetic.written(here, node.op, state[handle], inputs[1:])
            elif node.op == "ReadVariableOp":
                named[tensor(name)] = self._arithmetic.whole(here, state[handle])
            elif node.op == "ResourceGather":
                named[tensor(name)] = self._arithmetic.gathered(here, state[handle], inputs[1])
            elif node.op == "IdentityN":  # it would tie variables together
                named.update({f"{name}:{k}": passed for k, passed in enumerate(inputs)})
            else:
                outputs = self._arithmetic.copy(here, node, inputs, body.specs_of(name))
                named.update({f"{name}:{k}": made for k, made in enumerate(outputs)})
        return [named[output] for output in body.outputs], state


def _data_of(nodes: Iterable[NodeDef]) -> Iterator[str]:
    return (i for node in nodes for i in node.input if not is_control(i))


def _outputs_among(name: str, tensors: Iterable[str]) -> set[int]:
    """Which outputs of a node are among some tensors."""
    return {output_index(t) for t in tensors if node_of(t) == name}
