"""Training that a process does by itself: gradients of variables, applied, outside of all that is distributed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession  # of which every session of the script is one

from autodist.capture.session_training import applied
from autodist.capture.suspects import SUSPECTS, Suspect, suspects_of
from autodist.capture.training_hooks import function_called, listen, stop_listening
from autodist.capture.training_lines import LocalStep, Way, line_of_script, step_here

_LOOKS = 50
"""Times that the suspects' values are compared while the script runs; they are once more at its end."""


class LocalTraining:
    """Looks for training that is not distributed, until `stop` is called.

    It is seen where an optimizer of Keras applies gradients, where a session runs what applies them, and where
    variables of which `tf.GradientTape` or `tf.gradients` made gradients have other values later. Gradients by inputs,
    and gradients that are looked at alone, are none.

    Args:
        on_step: called with what is seen, once for all; what it raises is raised in the script.
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
        """What was found, looked for once more."""
        if self.found is None and self._suspected and any(s.has_changed for s in self._suspects):
            self._find(self._suspected)
        return self.found

    # -- what is seen ----------------------------------------------------------------------------------------------

    def on_applied(self, variables: Sequence[Any]) -> None:
        """An optimizer applies gradients."""
        graph = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or isinstance(graph, tf.__internal__.FuncGraph):  # else a session is to run them
            self._find(step_here(function_called()))

    def on_gradients(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Gradients of variables were made."""
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and not isinstance(graph, tf.__internal__.FuncGraph):
            made = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            self._graphs.setdefault(graph, []).extend(g.op.name for g in made if isinstance(g, tf.Tensor))
        elif self._looks < _LOOKS:
            self._looks += 1
            if self.look_again() is None and len(self._suspects) < 4 * SUSPECTS:
                self._suspected = self._suspected or step_here(function_called())
                self._suspects += suspects_of(sources)

    def on_run(self, session: BaseSession, fetches: Any) -> None:
        """A session runs something."""
        made = self._graphs.get(session.graph)
        if made and applied(session.graph, fetches, made):
            self._find(LocalStep(Way.SESSION, line_of_script(), session.graph))

    def around_call(self, function: Any, call: Callable[[], Any]) -> Any:
        """A `tf.function` is called; what it makes of gradients is seen where it is traced."""
        return call()

    def _find(self, step: LocalStep) -> None:
        self._on_step(step)  # first: what it raises is raised again where the script tries again
        self.found = step
        self.stop()
