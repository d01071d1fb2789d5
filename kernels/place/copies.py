"""Copies of variables: a loop or function that takes a handle gets that of a copy, which is refreshed before it."""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import is_control, tensor
from autodist.graph.parts import Variable


def add_copy(editor: GraphEditor, variable: Variable, name: str, suffix: str, device: str = "") -> str:
    """Adds the handle of a copy of a variable, which the session knows by the variable's name with a suffix."""
    copy = NodeDef(name=name, op="VarHandleOp", device=device)
    copy.attr["dtype"].type = variable.dtype.as_datatype_enum
    copy.attr["shape"].shape.CopyFrom(tf.TensorShape(variable.shape).as_proto())
    copy.attr["shared_name"].s = editor[variable.handle].attr["shared_name"].s + suffix.encode()
    return editor.add(copy)


def read_before(editor: GraphEditor, taker: str, variable: Variable, name: str, device: str = "") -> str:
    """Adds a read of a variable that waits for what the node `taker` waits for."""
    read = NodeDef(name=name, op="ReadVariableOp", device=device)
    read.attr["dtype"].type = variable.dtype.as_datatype_enum
    read.input[:] = [variable.handle, *filter(is_control, editor[taker].input)]
    return editor.add(read)


def take_copy(editor: GraphEditor, taker: str, taken: Collection[str], copy: str, value: str) -> None:
    """Lets a node take the handle of a copy, once that has a value, in place of other handles.

    Args:
        editor: of the graph.
        taker: the node.
        taken: the handles that it takes so far, as tensors.
        copy: the copy's handle.
        value: the node that makes the value.
    """
    device, dtype = editor[copy].device, editor[copy].attr["dtype"].type
    refresh = NodeDef(name=f"{value}/refresh", op="AssignVariableOp", device=device, input=[copy, value])
    refresh.attr["dtype"].type = dtype
    editor.add(refresh)
    # By data: a loop's body may ask for the shape of what it is given before it heeds the loop's control inputs.
    fresh = NodeDef(name=f"{value}/fresh", op="Identity", device=device, input=[copy, f"^{refresh.name}"])
    fresh.attr["T"].type = tf.resource.as_datatype_enum
    editor.add(fresh)
    inputs = [fresh.name if not is_control(i) and tensor(i) in taken else i for i in editor[taker].input]
    editor.set_inputs(taker, inputs)
