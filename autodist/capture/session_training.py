"""Whether what a plain session is asked for applies gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from autodist.graph.ops import Trait, having
from autodist.plain_nests import numbered

_READS = having(Trait.READ | Trait.QUERY)

_answers: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[int, int, frozenset[str]], bool]] = weakref.WeakKeyDictionary()


def trains(graph: tf.Graph, fetches: Any, gradients: Sequence[str]) -> bool:
    """Whether a run of `fetches` writes what depends on one of the gradients into a variable.

    Args:
        graph: of the session.
        fetches: as given to `tf.compat.v1.Session.run`; what is no part of the graph is passed over.
        gradients: names of the operations that make them.
    """
    roots = _operations(graph, fetches)
    known = _answers.setdefault(graph, {})
    key = (graph.version, len(gradients), frozenset(op.name for op in roots))
    if key not in known:
        known[key] = _trains(roots, {graph.get_operation_by_name(name) for name in gradients})
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


def _trains(roots: Iterable[tf.Operation], made: set[tf.Operation]) -> bool:
    needed = _closure(roots, lambda op: [*(t.op for t in op.inputs), *op.control_inputs])
    if needed.isdisjoint(made):
        return False
    moved = _closure(made & needed, lambda op: [c for t in op.outputs for c in t.consumers() if c in needed])
    return any(_writes(op) for op in moved)


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
