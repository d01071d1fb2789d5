"""Copies of variables for loops and functions that take a handle; a copy is refreshed before each use."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import is_control, tensor
from autodist.graph.op_types import types_of_outputs
from autodist.graph.parts import Variable


def add_copy(editor: GraphEditor, variable: Variable, name: str, suffix: str, device: str = "") -> str:
    """Adds the handle of a copy of a variable, whose session name is the variable's name with a suffix."""
    copy = NodeDef(name=name, op="VarHandleOp", device=device)
    copy.attr["dtype"].type = variable.dtype.as_datatype_enum
    copy.attr["shape"].shape.CopyFrom(tf.TensorShape(variable.shape).as_proto())
    copy.attr["shared_name"].s = editor[variable.handle].attr["shared_name"].s + suffix.encode()
    return editor.add(copy)


def read_before(
    editor: GraphEditor, taker: str, variable: Variable, name: str, device: str = "", writes: Iterable[str] = ()
) -> str:
    """Adds a read of a variable with the control inputs of the node `taker`, after writes that its inputs depend on."""
    waits = dict.fromkeys([*filter(is_control, editor[taker].input), *(f"^{write}" for write in writes)])
    return editor.add_op("ReadVariableOp", name, [variable.handle, *waits], variable.dtype, device)


def refresh_copy(editor: GraphEditor, copy: str, value: str) -> str:
    """Adds the write of a copy's new value; returns the node of its handle after the write.

    Args:
        editor: the editor of the graph.
        copy: handle of the copy.
        value: the node that computes the new value.
    """
    device, dtype = editor[copy].device, tf.as_dtype(editor[copy].attr["dtype"].type)
    refresh = editor.add_op("AssignVariableOp", f"{value}/refresh", [copy, value], dtype, device)
    # A data edge: a loop's body may query the shape of its input before the loop's control inputs have run.
    return editor.add_op("Identity", f"{value}/fresh", [copy, f"^{refresh}"], tf.resource, device)


def wait_for(editor: GraphEditor, name: str) -> list[str]:
    """Returns nodes that run after a node and with its results, which are added.

    A branch in a graph of TensorFlow 1 has no list of its writes: only its results wait for them.
    """
    node = editor[name]
    types = list(types_of_outputs(node)) if op_def_registry.get(node.op) else []  # not a function called as an op
    waits = [name]
    for k, dtype in enumerate(types):
        result = f"{name}/result_{k}"
        if result not in editor:
            editor.add_op("Identity", result, [f"{name}:{k}"], tf.as_dtype(dtype))
        waits.append(result)
    return waits


def take_fresh(editor: GraphEditor, takers: Iterable[str], taken: Collection[str], fresh: str) -> None:
    """Replaces the handles `taken` that nodes take by the handle of a copy after it has been refreshed."""
    for taker in takers:
        inputs = [fresh if not is_control(i) and tensor(i) in taken else i for i in editor[taker].input]
        editor.set_inputs(taker, inputs)


def take_copy(editor: GraphEditor, takers: Iterable[str], taken: Collection[str], copy: str, value: str) -> list[str]:
    """Replaces handles that nodes take by the handle of a copy, after the copy has been refreshed; returns added nodes.

    Args:
        editor: the editor of the graph.
        takers: the nodes.
        taken: the tensors of the handles to replace.
        copy: handle of the copy.
        value: the node that computes the copy's new value.
    """
    fresh = refresh_copy(editor, copy, value)
    take_fresh(editor, takers, taken, fresh)
    return [f"{value}/refresh", fresh]
