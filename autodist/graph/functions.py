"""The functions in the library of a graph, and those that a node calls."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef, FunctionDefLibrary


def functions_by_name(library: FunctionDefLibrary) -> dict[str, FunctionDef]:
    """Returns the functions of a library by their names."""
    return {function.signature.name: function for function in library.function}


def add_function(library: FunctionDefLibrary, function: FunctionDef) -> None:
    """Adds a function to a library, unless it has one of that name."""
    if all(known.signature.name != function.signature.name for known in library.function):
        library.function.append(function)


def called_by(node: tf.compat.v1.NodeDef) -> list[str]:
    """Returns the names of the functions in a node's attributes."""
    found = [value.func.name for value in node.attr.values() if value.HasField("func")]
    return found + [f.name for value in node.attr.values() for f in value.list.func]


def branches_of(node: tf.compat.v1.NodeDef) -> list[str]:
    """Returns the names of the functions that an `If` (if it holds, else) or a `Case` chooses from, in their order."""
    if "branches" in node.attr:
        return [branch.name for branch in node.attr["branches"].list.func]
    return [node.attr[name].func.name for name in ("then_branch", "else_branch")]
