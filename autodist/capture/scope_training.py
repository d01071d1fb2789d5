"""Detects local training of a scope's variables in addition to distributed steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession  # base class of all sessions

from autodist.capture.graphs import is_of_function
from autodist.capture.local_steps import (
    LocalStep,
    Suspect,
    TrainingKind,
    line_of_script,
    plain_variable,
    step_here,
    suspects_of,
)
from autodist.capture.local_training import applied
from autodist.capture.training_hooks import function_called, listen, stop_listening

_WINDOWS = 3
"""Number of windows (from an eager gradient to the next distributed step or gradient) with changed variables that count
as training. A script may once compute a gradient and then assign a variable without training.
"""

_LOOKS = 50
"""Largest number of comparisons for one function, and for eager gradients; each takes up to a millisecond."""

_KINDS = frozenset({TrainingKind.FUNCTION, TrainingKind.EAGER, TrainingKind.SESSION})
"""The kinds of training that are detected, each reported once."""


@dataclass
class _Marked:
    """A `tf.function`, or the script's eager code, that computes gradients of a scope's variables.

    Attributes:
        variables: the scope's variables.
        step: the step in its code.
        looks: number of comparisons of the variables.
    """

    variables: tuple[Any, ...]
    step: LocalStep
    looks: int = 0

    @property
    def names(self) -> list[str]:
        """Names of the variables."""
        return [plain_variable(v).name.removesuffix(":0") for v in self.variables]


@dataclass
class _Graph:
    """Known facts about a graph that a session may run.

    Attributes:
        made: operations of the handles of variables created in the scope.
        gradients: variables of gradients, by the name of the operation that computes the gradient.
    """

    made: set[str] = field(default_factory=set)
    gradients: dict[str, str] = field(default_factory=dict)


class ScopeTraining:
    """Searches for local training of a scope's variables after a distributed step has trained.

    An event counts as training in four cases: a `tf.function` with gradients of such variables changes them; an
    optimizer applies such gradients eagerly; variables change repeatedly after eager gradients; a plain session runs
    operations that apply such gradients. Values that are assigned, restored or averaged without gradients do not count.

    Args:
        on_step: called with the step and the names of variables, once each for functions, eager code and sessions.
        is_trained: returns True for a variable of a distributed step.
        pull: updates the script's variables.
        is_in_scope: returns True for a session's graph that the scope differentiates in.
    """

    def __init__(
        self,
        on_step: Callable[[LocalStep, list[str]], None],
        is_trained: Callable[[Any], bool],
        pull: Callable[[], None],
        is_in_scope: Callable[[object], bool] = lambda graph: False,
    ) -> None:
        self._on_step, self._is_trained, self._pull = on_step, is_trained, pull
        self._is_in_scope = is_in_scope
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, _Graph] = weakref.WeakKeyDictionary()
        self._made: dict[int, weakref.ref[Any]] = {}
        self._marked: weakref.WeakKeyDictionary[Any, _Marked] = weakref.WeakKeyDictionary()
        self._window: list[Suspect] = []
        self._windows = 0
        self._eager: _Marked | None = None
        self._has_begun = self._has_gradients = False
        self._reported: set[TrainingKind] = set()
        listen(self)

    def stop(self) -> None:
        """Ends the search. May be called twice."""
        self._window.clear()
        stop_listening(self)

    def begin(self) -> None:
        """Called when a distributed step trains."""
        self._has_begun = True

    @contextmanager
    def noting_variables(self) -> Iterator[None]:
        """Records the variables that are created while the context is open as the scope's."""

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            variable = next_creator(**kwargs)
            handle = _handle_of(variable)
            if handle is not None and not is_of_function(handle.graph):
                self._graphs.setdefault(handle.graph, _Graph()).made.add(handle.op.name)
            elif isinstance(variable, tf.Variable):
                self._made[id(variable)] = weakref.ref(variable)
            return variable

        with tf.variable_creator_scope(create):
            yield

    # -- events ----------------------------------------------------------------------------------------------------

    def on_gradients(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Gradients of variables were made."""
        function = function_called()
        if function is None and not tf.executing_eagerly():
            self._note_in_graph(sources, gradients)
        elif not self._has_gradients or self._is_to_mark(function is not None):
            in_scope = self._of_scope(sources)
            if in_scope:
                self._has_gradients = True
                self._mark(in_scope)

    def on_applied(self, variables: Sequence[Any]) -> None:
        """Called when an optimizer applies gradients; without gradients computed here, that is no training on data."""
        function, is_eager = function_called(), tf.executing_eagerly()
        if not self._has_gradients or (TrainingKind.EAGER if is_eager else TrainingKind.FUNCTION) in self._reported:
            return
        in_scope = self._of_scope(variables)
        if in_scope and is_eager and self._has_begun:
            self._find(TrainingKind.EAGER, _Marked(in_scope, step_here(function)))
        elif in_scope and (is_eager or function is not None):  # otherwise a session runs them
            self._mark(in_scope)

    def on_run(self, session: BaseSession, fetches: Any) -> None:
        """Called for each run of a session, which may apply gradients of variables in its graph."""
        is_to_look = self._has_begun and TrainingKind.SESSION not in self._reported
        known = self._graphs.get(session.graph) if is_to_look else None
        if known is None or not known.gradients:
            return
        names = {known.gradients[name] for name in applied(session.graph, fetches, known.gradients)}
        in_scope = sorted(names if self._is_in_scope(session.graph) else names & known.made)
        if in_scope:
            self._report(
                TrainingKind.SESSION, LocalStep(TrainingKind.SESSION, line_of_script(), session.graph), in_scope
            )

    def around_call(self, function: Any, call: Callable[[], Any]) -> Any:
        """Calls a `tf.function`."""
        is_to_look = self._has_begun and TrainingKind.FUNCTION not in self._reported
        marked = self._marked.get(function) if is_to_look else None
        if marked is None or marked.looks >= _LOOKS:
            return call()
        marked.looks += 1
        self._pull()
        before = suspects_of(marked.variables)
        found = call()
        if any(suspect.is_known_to_have_changed for suspect in before):
            self._find(TrainingKind.FUNCTION, marked)
        return found

    def before_step(self) -> None:
        """Called before a distributed step trains: changes of variables until now are not the step's."""
        if self._window:
            self._look()

    # --------------------------------------------------------------------------------------------------------------

    def _of_scope(self, sources: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(s for s in sources if isinstance(plain_variable(s), tf.Variable) and self._belongs_to_scope(s))

    def _belongs_to_scope(self, source: Any) -> bool:
        variable = plain_variable(source)
        made = self._made.get(id(variable))
        return (made is not None and made() is variable) or self._is_trained(variable)

    def _note_in_graph(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        for source, gradient in zip(sources, gradients, strict=True):
            handle = _handle_of(plain_variable(source))
            made = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            if handle is not None and isinstance(made, tf.Tensor) and not is_of_function(handle.graph):
                known = self._graphs.setdefault(handle.graph, _Graph())
                known.gradients[made.op.name] = handle.op.name

    def _is_to_mark(self, is_function: bool) -> bool:
        """Returns False if such training has been reported, or eager gradients have been compared often enough."""
        if is_function:
            return TrainingKind.FUNCTION not in self._reported
        return TrainingKind.EAGER not in self._reported and (self._eager is None or self._eager.looks < _LOOKS)

    def _mark(self, variables: tuple[Any, ...]) -> None:
        function = function_called()
        if function is not None:
            if function not in self._marked:
                self._marked[function] = _Marked(variables, step_here(function))
        elif self._has_begun:
            self._look()
            self._eager = self._eager or _Marked(variables, step_here())
            self._eager.looks += 1
            self._window = suspects_of(variables)

    def _look(self) -> None:
        """Ends a window, which started at a gradient."""
        self._windows += any(suspect.is_known_to_have_changed for suspect in self._window)
        self._window = []
        if self._windows >= _WINDOWS and self._eager is not None:
            self._find(TrainingKind.EAGER, self._eager)

    def _find(self, kind: TrainingKind, marked: _Marked) -> None:
        self._report(kind, marked.step, marked.names)

    def _report(self, kind: TrainingKind, step: LocalStep, names: list[str]) -> None:
        self._window.clear()
        self._reported.add(kind)
        if self._reported == _KINDS:
            self.stop()
        self._on_step(step, names)


def _handle_of(variable: Any) -> tf.Tensor | None:
    """Returns the handle of a variable in a graph; None for other values."""
    handle = variable if isinstance(variable, tf.Tensor) else getattr(variable, "handle", None)
    is_handle = isinstance(handle, tf.Tensor) and handle.dtype == tf.resource and tf.is_symbolic_tensor(handle)
    return handle if is_handle else None
