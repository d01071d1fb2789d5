"""Origins: the lines of the script that created the nodes of a captured graph."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from autodist.graph.names import node_of

Origins = Callable[[str], str | None]
"""Returns the line of the script that created a captured node, as "train.py:12"; None if it is unknown."""

_LIBRARIES = ("tensorflow", "keras", "tf_keras", "autodist", "autodist.kernels", "autodist.strategies")
_WORD = re.compile(r"[\w.\-/]+(?::\d+)?")
_MAX_LINES = 3
"""Most lines of the script that one error message lists."""


def no_origins(_: str) -> str | None:
    """Returns None: the origins of a graph that was not captured."""
    return None


def note_origins(graph: tf.Graph, nodes: Iterable[str]) -> Origins:
    """Returns the origins of nodes of a graph.

    Looks them up at once, at about 50 µs a node: TensorFlow's records may not outlive the graph.

    Args:
        graph: the graph; it need not contain all of `nodes`.
        nodes: names that error messages may contain.
    """
    wanted = set(nodes)
    lines = {operation.name: line_of(operation) for operation in graph.get_operations() if operation.name in wanted}
    return lines.get


def line_of(operation: tf.Operation) -> str | None:
    """Returns the line of the script, as "train.py:12", that created an operation; None if no script did."""
    return _line_of_script(operation.traceback)


def origins_in(text: str, origin_of: Origins) -> Iterator[str]:
    """Returns a sentence on the origin of each node that a text names, for the first few of them."""
    nodes_by_line: dict[str, str] = {}
    for name in (node_of(word).rstrip(".") for word in _WORD.findall(text)):
        line = origin_of(name)
        if line is not None and len(nodes_by_line) < _MAX_LINES:
            nodes_by_line.setdefault(line, name)
    return (f"{name} is created in {line}" for line, name in nodes_by_line.items())


def _line_of_script(trace: Iterable[Any]) -> str | None:
    """Returns the innermost line that is not in a library that builds graphs."""
    libraries = tuple(f"{at}/" for name in _LIBRARIES if name in sys.modules for at in sys.modules[name].__path__)
    for frame in reversed(list(trace)):
        if not frame.filename.startswith(libraries):
            return f"{_short(frame.filename)}:{frame.lineno}"
    return None


def _short(file: str) -> str:
    path = pathlib.Path(file)
    here = pathlib.Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
