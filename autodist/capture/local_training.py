"""Detects local training: variables that are trained outside of distributed steps, by one worker for itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession  # base class of all sessions

from autodist.capture.graphs import is_of_function
from autodist.capture.local_steps import (
    SUSPECTS,
    LocalStep,
    Suspect,
    TrainingKind,
    line_of_script,
    step_here,
    suspects_of,
)
from autodist.capture.training_hooks import function_called, listen, stop_listening
from autodist.graph.ops import Trait, having
from autodist.graph.walks import reach
from autodist.tf_compat.plain_nests import numbered

_LOOKS = 50
"""Number of times that the values of suspects are compared while the script runs; another time follows at its end."""


class LocalTraining:
    """Searches for training that is not distributed, until `stop` is called.

    Three events count as training. An optimizer of Keras applies gradients. A session runs an operation that applies
    gradients. A *suspect*, a variable whose gradient `tf.GradientTape` or `tf.gradients` has computed, has another
    value later. Gradients with respect to inputs, and gradients that are only read, do not count.

    Args:
        on_step: called once with the step that is found; an exception that it raises is raised in the script.
    """

    def __init__(self, on_step: Callable[[LocalStep], None]) -> None:
        self._on_step = on_step
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, list[str]] = weakref.WeakKeyDictionary()
        self._suspects: list[Suspect] = []
        self._suspected: LocalStep | None = None
        self._looks = 0
        self.found: LocalStep | None = None
        listen(self)

    def stop(self) -> None:
        """Ends the search. May be called twice."""
        self._suspects.clear()
        stop_listening(self)

    def look_again(self) -> LocalStep | None:
        """Compares the suspects again and returns the step that was found."""
        if self.found is None and self._suspected and any(s.has_changed for s in self._suspects):
            self._find(self._suspected)
        return self.found

    # -- events ----------------------------------------------------------------------------------------------------

    def on_applied(self, variables: Sequence[Any]) -> None:
        """Called when an optimizer applies gradients."""
        graph = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or is_of_function(graph):  # otherwise a session runs them
            self._find(step_here(function_called()))

    def on_gradients(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Called when gradients with respect to `sources` were computed."""
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and not is_of_function(graph):
            made = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            self._graphs.setdefault(graph, []).extend(g.op.name for g in made if isinstance(g, tf.Tensor))
        elif self._looks < _LOOKS:
            self._looks += 1
            if self.look_again() is None and len(self._suspects) < 4 * SUSPECTS:
                self._suspected = self._suspected or step_here(function_called())
                self._suspects += suspects_of(sources)

    def on_run(self, session: BaseSession, fetches: Any) -> None:
        """Called when a session runs `fetches`."""
        made = self._graphs.get(session.graph)
        if made and applied(session.graph, fetches, made):
            self._find(LocalStep(TrainingKind.SESSION, line_of_script(), session.graph))

    def around_call(self, function: Any, call: Callable[[], Any]) -> Any:
        """Calls a `tf.function`; its gradients are detected while it is traced."""
        return call()

    def _find(self, step: LocalStep) -> None:
        self._on_step(step)  # before `found` is set: if it raises, the script's next attempt raises as well
        self.found = step
        self.stop()


_READS = having(Trait.READ | Trait.QUERY)

_cache: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[int, int, frozenset[str]], frozenset[str]]] = (
    weakref.WeakKeyDictionary()
)


def applied(graph: tf.Graph, fetches: Any, gradients: Collection[str]) -> frozenset[str]:
    """Returns the gradients on which the variable writes of a run of `fetches` depend.

    Args:
        graph: the session's graph.
        fetches: fetches of `tf.compat.v1.Session.run`; those outside the graph are ignored.
        gradients: names of the operations that compute gradients.
    """
    roots = _operations(graph, fetches)
    known = _cache.setdefault(graph, {})
    key = (graph.version, len(gradients), frozenset(op.name for op in roots))
    if key not in known:
        known[key] = _applied(roots, gradients)
    return known[key]


def _operations(graph: tf.Graph, fetches: Any) -> set[tf.Operation]:
    found = set()
    for fetch in tf.nest.flatten(numbered(fetches), expand_composites=True):
        try:
            element = graph.as_graph_element(fetch)
        except (TypeError, ValueError, KeyError):  # the session itself will raise a better error
            continue
        found.add(element.op if isinstance(element, tf.Tensor) else element)
    return found


def _applied(roots: Iterable[tf.Operation], gradients: Collection[str]) -> frozenset[str]:
    needed = reach(roots, lambda op: [*(t.op for t in op.inputs), *op.control_inputs])
    if not any(op.name in gradients for op in needed):
        return frozenset()
    written = reach((op for op in needed if _writes(op)), lambda op: [t.op for t in op.inputs])
    return frozenset(op.name for op in written if op.name in gradients)


def _writes(op: tf.Operation) -> bool:
    """Returns True if an operation may write a variable: it takes a handle or reference, and is no known read."""
    takes_variable = any(t.dtype == tf.resource or t.dtype._is_ref_dtype for t in op.inputs)
    return takes_variable and op.op_def is not None and op.op_def.is_stateful and op.type not in _READS
