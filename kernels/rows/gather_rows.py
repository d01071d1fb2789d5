"""Gathers of a variable's value become gathers in the variable, which copy the rows asked for alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import QUERIES, READS
from autodist.graph.names import is_control, node_of
from autodist.graph.op_types import is_in_batches
from autodist.graph.step import Step
from autodist.kernels.rows.rule import Refusal, Rewrite, RowFacts, RowRule


@dataclass(frozen=True)
class GatherRows(RowRule):
    """A gather of a read becomes a gather in the variable, and the shape of a read the variable's shape.

    A variable with sparse updates is read by copying all of it, so this pays on one device already; a parameter server
    then sends rows, not tables.

        ReadVariableOp(v) → GatherV2(·, ids)       becomes      ResourceGather(v, ids)
    """

    name: ClassVar[str] = "gather-rows"
    ops: ClassVar[tuple[str, ...]] = ("ReadVariableOp",)

    def candidates(self, item: Step) -> Iterable[str]:
        return _reads_asked_for_rows(item)

    def match(self, rows: RowFacts, node: NodeDef) -> Rewrite | Refusal | None:
        editor = rows.editor
        refusal = None
        for answer in _answers(editor, node.name):
            if isinstance(answer, _Ask):
                break
            refusal = refusal or answer
        else:
            return refusal

        def rewrite() -> None:
            done = []
            for answer in _answers(editor, node.name):  # anew: each gather orders writes behind it
                if isinstance(answer, _Ask):
                    _ask_variable(editor, answer)
                    done.append(answer.name)
            if done:
                returned = {*map(node_of, rows.item.outputs), *rows.item.targets}
                _drop_unused_read(editor, node.name, done, returned)
                editor.drop_lost_colocation()

        return rewrite


def _reads_asked_for_rows(item: Step) -> list[str]:
    """The reads of variables whose rows, or whose shape, something asks for."""
    nodes = item.graph_index.nodes
    found: dict[str, None] = {}
    for node in item.graph_index.of_op("GatherV2", "Shape"):
        source = nodes[node_of(node.input[0])]
        while source.op == "Identity":
            source = nodes[node_of(source.input[0])]
        if source.op == "ReadVariableOp":
            found[source.name] = None
    return list(found)


@dataclass(frozen=True)
class _Copy:
    """A node that has a variable's whole value: a read, or an Identity of one.

    Attributes:
        name: of the node.
        read: from which it comes.
        handle: of the variable.
        waits: control inputs that the value stands behind.
    """

    name: str
    read: str
    handle: str
    waits: tuple[str, ...]


def _copies(editor: GraphEditor, read: str) -> list[_Copy]:
    handle, *waits = editor[read].input
    found = [_Copy(read, read, handle, tuple(waits))]
    for copy in found:
        for consumer in sorted(editor.consumers(copy.name)):
            node = editor[consumer]
            if node.op == "Identity" and node_of(node.input[0]) == copy.name and not is_control(node.input[0]):
                found.append(_Copy(consumer, read, handle, (*copy.waits, *node.input[1:])))
    return found


@dataclass(frozen=True)
class _Ask:
    """A node that asks a copy for rows, or for its shape, and may ask the variable.

    Attributes:
        name: of the node.
        copy: that it asks.
        late: writes of the variable that have to wait for it.
    """

    name: str
    copy: _Copy
    late: frozenset[str] = frozenset()


def _answers(editor: GraphEditor, read: str) -> Iterator[_Ask | Refusal]:
    """For each gather and shape of a read, whether it may be one of the variable."""
    asked = [(copy, name) for copy in _copies(editor, read) for name in sorted(editor.consumers(copy.name))]
    for copy, name in asked:
        node = editor[name]
        if is_control(node.input[0]) or node_of(node.input[0]) != copy.name:
            continue
        if node.op == "Shape":
            yield _Ask(name, copy)
        elif node.op == "GatherV2" and not gathers_rows(editor, node, copy.name):
            yield Refusal(f"{name} takes no whole rows along its first axis")
        elif node.op == "GatherV2":
            late = _writes_after(editor, copy)
            if late & editor.ancestors([name]):
                yield Refusal(f"the rows that {name} takes are known only once the variable has another value")
            else:
                yield _Ask(name, copy, frozenset(late))


def _ask_variable(editor: GraphEditor, ask: _Ask) -> None:
    """Turns a gather or a shape of a copy into that of the variable."""
    node = editor[ask.name]
    if node.op == "Shape":
        _shape_of_variable(editor, node, ask.copy)
        return
    _gather_in_variable(editor, node, ask.copy)
    for write in sorted(ask.late):
        editor.add_control(write, [ask.name])


def _writes_after(editor: GraphEditor, copy: _Copy) -> set[str]:
    """Writes of the variable that come after the read: they have to come after a gather that takes its place, too."""
    writes = [c for c in editor.consumers(copy.handle) if editor[c].op not in READS | QUERIES]
    return {w for w in writes if copy.read in editor.ancestors([w])}


def _drop_unused_read(editor: GraphEditor, read: str, instead: list[str], named: Set[str]) -> None:
    """A read that nothing takes a value from would still copy the variable, for what is ordered after it."""
    copies = [copy.name for copy in _copies(editor, read)]
    taken = any(
        node_of(i) == name and not is_control(i)
        for name in copies for consumer in editor.consumers(name) if consumer not in copies
        for i in editor[consumer].input
    )  # fmt: skip
    if taken or not named.isdisjoint(copies):
        return
    for name in reversed(copies):
        editor.replace_control(name, instead)
        editor.remove([name])


def gathers_rows(editor: GraphEditor, node: NodeDef, table: str) -> bool:
    """Whether a GatherV2 takes whole rows of what the node `table` makes."""
    if node_of(node.input[0]) != table or node_of(node.input[1]) == table or is_in_batches(node):
        return False
    axis = editor[node_of(node.input[2])]
    return axis.op == "Const" and int(tf.make_ndarray(axis.attr["value"].tensor)) == 0


def _gather_in_variable(editor: GraphEditor, node: NodeDef, copy: _Copy) -> None:
    dtype = node.attr["Tparams"].type
    inputs = [copy.handle, node.input[1], *node.input[3:], *copy.waits]
    node.op = "ResourceGather"
    for key in ("Tparams", "Taxis", "batch_dims", "_class"):
        node.attr.pop(key, None)
    node.attr["dtype"].type = dtype
    node.attr["validate_indices"].b = True
    editor.set_inputs(node.name, inputs)


def _shape_of_variable(editor: GraphEditor, node: NodeDef, copy: _Copy) -> None:
    inputs = [copy.handle, *node.input[1:], *copy.waits]
    node.op = "VariableShape"
    node.attr.pop("T", None)
    node.attr.pop("_class", None)
    editor.set_inputs(node.name, inputs)
