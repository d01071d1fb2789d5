"""Origins: the lines of the script in which the nodes of a captured graph were made."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from autodist.graph.names import node_of

Origins = Callable[[str], str | None]
"""By the name of a captured node, "train.py:12" where it was made; None where that is not known."""

_LIBRARIES = ("tensorflow", "keras", "tf_keras", "autodist", "autodist.kernels", "autodist.strategies")
_WORD = re.compile(r"[\w.\-/]+(?::\d+)?")
_TOLD = 3
"""Lines of the script that are told of one error."""


def no_origins(_: str) -> str | None:
    """The origins of a graph of which nothing is known."""
    return None


def note_origins(graph: tf.Graph, nodes: Iterable[str]) -> Origins:
    """Where nodes of a graph were made.

    It is looked up here, some 50 µs a node: what TensorFlow gives for it may not outlive the graph.

    Args:
        graph: the graph, in which not all of `nodes` need to stand.
        nodes: names, of those that errors tell of.
    """
    wanted = set(nodes)
    lines = {operation.name: line_of(operation) for operation in graph.get_operations() if operation.name in wanted}
    return lines.get


def line_of(operation: tf.Operation) -> str | None:
    """The line of the script, as "train.py:12", in which an operation was made; None if no script made it."""
    return _line_of_script(operation.traceback)


def origins_in(text: str, origin_of: Origins) -> Iterator[str]:
    """Tells where the nodes were made that a text names, the first few of them."""
    told: dict[str, str] = {}
    for name in (node_of(word).rstrip(".") for word in _WORD.findall(text)):
        line = origin_of(name)
        if line is not None and len(told) < _TOLD:
            told.setdefault(line, name)
    return (f"{name} is made in {line}" for line, name in told.items())


def _line_of_script(trace: Iterable[Any]) -> str | None:
    """The innermost line that is no library's which builds graphs."""
    libraries = tuple(f"{at}/" for name in _LIBRARIES if name in sys.modules for at in sys.modules[name].__path__)
    for frame in reversed(list(trace)):
        if not frame.filename.startswith(libraries):
            return f"{_short(frame.filename)}:{frame.lineno}"
    return None


def _short(file: str) -> str:
    path = pathlib.Path(file)
    here = pathlib.Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
