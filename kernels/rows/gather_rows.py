"""Gathers rows directly from a variable, so that only the selected rows are copied, and not its whole value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import QUERIES, READS
from autodist.graph.names import is_control, node_of
from autodist.graph.op_types import is_in_batches
from autodist.graph.step import CapturedStep
from autodist.kernels.rule import Facts, Refusal, Rewrite, Rule


@dataclass(frozen=True)
class GatherRows(Rule):
    """Gathers rows from a variable instead of from its value, and takes a shape from the variable as well.

    The read of a variable with sparse updates copies the whole variable, so this saves time even on one device. A
    parameter server then sends rows instead of tables.

        ReadVariableOp(v) → GatherV2(·, ids)       becomes      ResourceGather(v, ids)
    """

    name: ClassVar[str] = "gather-rows"
    ops: ClassVar[tuple[str, ...]] = ("ReadVariableOp",)

    def candidates(self, step: CapturedStep) -> Iterable[str]:
        return _reads_by_rows(step)

    def match(self, rows: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        editor = rows.editor
        refusal = None
        for match in _matches(editor, node.name):
            if isinstance(match, _Access):
                break
            refusal = refusal or match
        else:
            return refusal

        def rewrite() -> None:
            done = []
            for match in _matches(editor, node.name):  # recomputed, since each gather adds control inputs to writes
                if isinstance(match, _Access):
                    _access_variable(editor, match)
                    done.append(match.name)
            if done:
                returned = {*map(node_of, rows.step.outputs), *rows.step.targets}
                _drop_unused_read(editor, node.name, done, returned)
                editor.drop_lost_colocation()

        return rewrite


def _reads_by_rows(step: CapturedStep) -> list[str]:
    """Returns the ReadVariableOps whose value is the input of a gather or of a shape."""
    nodes = step.graph_index.nodes
    found: dict[str, None] = {}
    for node in step.graph_index.of_op("GatherV2", "Shape"):
        source = nodes[node_of(node.input[0])]
        while source.op == "Identity":
            source = nodes[node_of(source.input[0])]
        if source.op == "ReadVariableOp":
            found[source.name] = None
    return list(found)


@dataclass(frozen=True)
class _Copy:
    """A node that outputs a variable's whole value: a read, or an Identity of one.

    Attributes:
        name: of the node.
        read: the ReadVariableOp whose value it outputs.
        handle: the handle of the variable.
        waits: control inputs of the read and the Identities.
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
class _Access:
    """A GatherV2 or Shape node that reads a copy of a variable and can use the variable's handle instead.

    Attributes:
        name: of the node.
        copy: the copy that it reads.
        late: writes of the variable that must run after it.
    """

    name: str
    copy: _Copy
    late: frozenset[str] = frozenset()


def _matches(editor: GraphEditor, read: str) -> Iterator[_Access | Refusal]:
    """Yields each GatherV2 and Shape node that can use the variable, and a refusal for each GatherV2 that cannot."""
    readers = [(copy, name) for copy in _copies(editor, read) for name in sorted(editor.consumers(copy.name))]
    for copy, name in readers:
        node = editor[name]
        if is_control(node.input[0]) or node_of(node.input[0]) != copy.name:
            continue
        if node.op == "Shape":
            yield _Access(name, copy)
        elif node.op == "GatherV2" and not gathers_rows(editor, node, copy.name):
            yield Refusal(f"{name} does not gather whole rows along its first axis")
        elif node.op == "GatherV2":
            late = _writes_after(editor, copy)
            if late & editor.ancestors([name]):
                yield Refusal(f"the rows that {name} gathers are only known after the variable has changed")
            else:
                yield _Access(name, copy, frozenset(late))


def _access_variable(editor: GraphEditor, access: _Access) -> None:
    """Rewrites a GatherV2 or Shape node so that it uses the variable's handle."""
    node = editor[access.name]
    if node.op == "Shape":
        _shape_of_variable(editor, node, access.copy)
        return
    _gather_in_variable(editor, node, access.copy)
    for write in sorted(access.late):
        editor.add_control(write, [access.name])


def _writes_after(editor: GraphEditor, copy: _Copy) -> set[str]:
    """Returns the variable's writes that run after the read; they must also run after a gather that replaces it."""
    writes = [c for c in editor.consumers(copy.handle) if editor[c].op not in READS | QUERIES]
    return {w for w in writes if copy.read in editor.ancestors([w])}


def _drop_unused_read(editor: GraphEditor, read: str, instead: list[str], named: Set[str]) -> None:
    """Removes a read without consumers, which would still copy the variable.

    Control inputs from the read are replaced by control inputs from the nodes `instead`.

    Args:
        editor: the graph.
        read: name of the ReadVariableOp.
        instead: names of the rewritten nodes.
        named: nodes that the step returns or runs; they are kept.
    """
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
    """Returns True if a GatherV2 gathers whole rows of the output of the node `table`."""
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
