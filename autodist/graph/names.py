"""Spelling of inputs in a GraphDef: "node" and "node:0" are one tensor, "^node" is a control input."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import tensorflow as tf

_remembered = functools.lru_cache(maxsize=1 << 17)
"""Kernels parse the same few names again and again."""


def is_control(spelling: str) -> bool:
    return spelling.startswith("^")


@_remembered
def node_of(spelling: str) -> str:
    """Returns the name of the node of an input or a tensor.

    >>> node_of("^a"), node_of("a:1"), node_of("a")
    ('a', 'a', 'a')
    """
    if spelling.startswith("^"):
        return spelling[1:]
    return spelling.partition(":")[0]


@_remembered
def tensor(spelling: str) -> str:
    """Returns the canonical name of a tensor, with its output index.

    >>> tensor("a"), tensor("a:1")
    ('a:0', 'a:1')
    """
    return spelling if ":" in spelling else spelling + ":0"


def renamed(spelling: str, names: Mapping[str, str]) -> str:
    """Returns an input or a tensor with the name of its node replaced, if `names` maps it.

    >>> renamed("a:1", {"a": "b"}), renamed("^a", {"a": "b"}), renamed("c", {"a": "b"})
    ('b:1', '^b', 'c')
    """
    name = node_of(spelling)
    return spelling.replace(name, names[name], 1) if name in names else spelling


def data_renamed(inputs: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Returns the inputs of a node, `renamed` except for control inputs."""
    return [spelling if is_control(spelling) else renamed(spelling, names) for spelling in inputs]


def data_inputs(node: tf.compat.v1.NodeDef) -> list[str]:
    """Returns the names of the tensors that a node reads; control inputs are left out."""
    return [tensor(spelling) for spelling in node.input if not is_control(spelling)]


def output_index(spelling: str) -> int:
    _, _, index = spelling.partition(":")
    return int(index) if index else 0


@_remembered
def as_input(tensor_name: str) -> str:
    """Returns the spelling of a tensor in a NodeDef: the first output has no index."""
    return tensor_name[:-2] if tensor_name.endswith(":0") else tensor_name
