"""The gradients that a run of a plain session applies."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

from autodist.graph.ops import Trait, having
from autodist.tf_compat.plain_nests import numbered

_READS = having(Trait.READ | Trait.QUERY)

_answers: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[int, int, frozenset[str]], frozenset[str]]] = (
    weakref.WeakKeyDictionary()
)


def applied(graph: tf.Graph, fetches: Any, gradients: Collection[str]) -> frozenset[str]:
    """Returns those of the gradients on which something depends that a run of `fetches` writes into a variable.

    Args:
        graph: of the session.
        fetches: as given to `tf.compat.v1.Session.run`; what is no part of the graph is passed over.
        gradients: names of the operations that make them.
    """
    roots = _operations(graph, fetches)
    known = _answers.setdefault(graph, {})
    key = (graph.version, len(gradients), frozenset(op.name for op in roots))
    if key not in known:
        known[key] = _applied(roots, gradients)
    return known[key]


def _operations(graph: tf.Graph, fetches: Any) -> set[tf.Operation]:
    found = set()
    for fetch in tf.nest.flatten(numbered(fetches), expand_composites=True):
        try:
            element = graph.as_graph_element(fetch)
        except (TypeError, ValueError, KeyError):  # the session says so, better
            continue
        found.add(element.op if isinstance(element, tf.Tensor) else element)
    return found


def _applied(roots: Iterable[tf.Operation], gradients: Collection[str]) -> frozenset[str]:
    needed = _closure(roots, lambda op: [*(t.op for t in op.inputs), *op.control_inputs])
    if not any(op.name in gradients for op in needed):
        return frozenset()
    written = _closure((op for op in needed if _writes(op)), lambda op: [t.op for t in op.inputs])
    return frozenset(op.name for op in written if op.name in gradients)


def _closure(roots: Iterable[tf.Operation], following: Any) -> set[tf.Operation]:
    found = set(roots)
    front = list(found)
    while front:
        for op in following(front.pop()):
            if op not in found:
                found.add(op)
                front.append(op)
    return found


def _writes(op: tf.Operation) -> bool:
    """Whether an operation may write a variable: it is given one, by handle or reference, and is not known to read."""
    given = any(t.dtype == tf.resource or t.dtype._is_ref_dtype for t in op.inputs)
    return given and op.op_def is not None and op.op_def.is_stateful and op.type not in _READS
