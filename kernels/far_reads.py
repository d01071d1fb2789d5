"""Reads of variables that another worker holds: made once a step, where the variable is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import QUERIES, READS
from autodist.graph.item import GraphItem, Variable
from autodist.graph.names import is_control, node_of, tensor
from autodist.kernels.base import Context, Kernel


@dataclass(frozen=True)
class ReadFarVariables(Kernel):
    """Places handles and reads of far variables at their owners.

    Reads of one variable that wait for the same nodes become one. What takes the handle itself (a loop, which would
    read across the network at every turn) gets that of a copy on this worker, which is refreshed once a step.
    """

    name: ClassVar[str] = "read-far-variables"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        far = {v.handle: item.owners[v.name] for v in item.variables if v.name in item.owners}
        far = {handle: owner for handle, owner in far.items() if owner != context.worker}
        if context.workers == 1 or not far:
            return item
        editor = GraphEditor(item.graph_def)
        _read_far(editor, item, context, far)
        return item.with_graph(editor.to_graph_def())


def _read_far(editor: GraphEditor, item: GraphItem, context: Context, far: Mapping[str, int]) -> None:
    for handle, worker in far.items():
        if handle not in editor:
            continue
        device = context.home(worker, item.by_handle[handle].dtype)
        _merge_reads(editor, handle)
        takers = [name for name in sorted(editor.consumers(handle)) if editor[name].op not in READS | QUERIES]
        if takers:
            _give_copy(editor, item.by_handle[handle], takers, context, device)
        editor[handle].device = device
        for name in editor.consumers(handle):
            editor[name].device = device


def _merge_reads(editor: GraphEditor, handle: str) -> None:
    first: dict[tuple[str, ...], str] = {}
    for name in sorted(editor.consumers(handle)):
        node = editor[name]
        if node.op != "ReadVariableOp":
            continue
        kept = first.setdefault(tuple(sorted(filter(is_control, node.input))), name)
        if kept != name:
            editor.rewire(tensor(name), tensor(kept))
            editor.replace_control(name, [kept])
            editor.remove([name])


def _give_copy(editor: GraphEditor, variable: Variable, takers: list[str], context: Context, device: str) -> None:
    copy = NodeDef(
        name=f"autodist/copy/{variable.handle}", op="VarHandleOp", device=context.home(context.worker, variable.dtype)
    )
    copy.attr["dtype"].type = variable.dtype.as_datatype_enum
    copy.attr["shape"].shape.CopyFrom(tf.TensorShape(variable.shape).as_proto())
    copy.attr["shared_name"].s = editor[variable.handle].attr["shared_name"].s + b"/copy"
    editor.add(copy)
    for position, taker in enumerate(takers):
        waits = [i for i in editor[taker].input if is_control(i)]
        read = NodeDef(name=f"{copy.name}/read_{position}", op="ReadVariableOp", device=device)
        read.attr["dtype"].type = variable.dtype.as_datatype_enum
        read.input[:] = [variable.handle, *waits]
        editor.add(read)
        refresh = NodeDef(name=f"{copy.name}/refresh_{position}", op="AssignVariableOp", device=copy.device)
        refresh.attr["dtype"].type = variable.dtype.as_datatype_enum
        refresh.input[:] = [copy.name, read.name]
        editor.add(refresh)
        # By data: a loop's body may ask for the shape of what it is given before it heeds the loop's control inputs.
        fresh = NodeDef(name=f"{copy.name}/fresh_{position}", op="Identity", device=copy.device)
        fresh.attr["T"].type = tf.resource.as_datatype_enum
        fresh.input[:] = [copy.name, f"^{refresh.name}"]
        editor.add(fresh)
        inputs = [fresh.name if node_of(i) == variable.handle and not is_control(i) else i for i in editor[taker].input]
        editor.set_inputs(taker, inputs)
