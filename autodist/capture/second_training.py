"""Training of a scope's variables beside steps that are distributed, which each worker does by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession  # of which every session of the script is one

from autodist.capture.suspects import Suspect, plain_variable, suspects_of
from autodist.capture.training_hooks import function_called, listen, stop_listening
from autodist.capture.training_lines import LocalStep, step_here

_WINDOWS = 3
"""Of eager gradients, how often variables change before the next distributed step until that counts as training: what
once looks at a gradient and then gives a variable a value trains nothing."""


@dataclass(frozen=True)
class _Marked:
    """A `tf.function` in which gradients of a scope's variables are made."""

    variables: tuple[Any, ...]
    step: LocalStep


class SecondTraining:
    """Looks for training of a scope's variables that is not distributed, once a distributed step has trained.

    It is seen where a `tf.function` in which gradients of such variables are made changes their values, where an
    optimizer applies such gradients eagerly, and where variables change again and again behind eager gradients. Values
    that are assigned, restored or averaged without gradients are none.

    Args:
        on_step: called with what is seen, and the names of variables, once for all.
        is_trained: says of a variable that a distributed step works on it.
        pull: brings the script's variables up to date.
    """

    def __init__(
        self,
        on_step: Callable[[LocalStep, list[str]], None],
        is_trained: Callable[[Any], bool],
        pull: Callable[[], None],
    ) -> None:
        self._on_step, self._is_trained, self._pull = on_step, is_trained, pull
        self._made: dict[int, weakref.ref[Any]] = {}
        self._marked: weakref.WeakKeyDictionary[Any, _Marked] = weakref.WeakKeyDictionary()
        self._window: list[Suspect] = []
        self._windows = 0
        self._eager: _Marked | None = None
        self._has_begun = self._has_gradients = False
        listen(self)

    def stop(self) -> None:
        """Ends the search. May be called twice."""
        self._window.clear()
        stop_listening(self)

    def begin(self) -> None:
        """A distributed step trains."""
        self._has_begun = True

    @contextmanager
    def noting_variables(self) -> Iterator[None]:
        """Variables that are made while it is open are the scope's."""

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            variable = next_creator(**kwargs)
            if isinstance(variable, tf.Variable):
                self._made[id(variable)] = weakref.ref(variable)
            return variable

        with tf.variable_creator_scope(create):
            yield

    # -- what is seen ----------------------------------------------------------------------------------------------

    def on_gradients(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Gradients of variables were made."""
        mine = self._of_scope(sources)
        if mine and self._is_within(function_called()):
            self._has_gradients = True
            self._mark(mine)

    def on_applied(self, variables: Sequence[Any]) -> None:
        """An optimizer applies gradients; of variables alone, if none was made here, which is no training on data."""
        mine = self._of_scope(variables) if self._has_gradients else ()
        if not mine:
            return
        if tf.executing_eagerly() and self._has_begun:
            self._find(_Marked(mine, step_here(function_called())))
        elif self._is_within(function_called()):
            self._mark(mine)

    def on_run(self, session: BaseSession, fetches: Any) -> None:
        """A session runs something: its graph has variables of its own."""

    def around_call(self, function: Any, call: Callable[[], Any]) -> Any:
        """A `tf.function` is called."""
        marked = self._marked.get(function) if self._has_begun else None
        if marked is None:
            return call()
        self._pull()
        before = suspects_of(marked.variables)
        found = call()
        if any(suspect.is_known_to_have_changed for suspect in before):
            self._find(marked)
        return found

    def before_step(self) -> None:
        """A distributed step is about to train: what has changed until now it has not."""
        if self._window:
            self._look()

    # --------------------------------------------------------------------------------------------------------------

    def _of_scope(self, sources: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(s for s in sources if isinstance(plain_variable(s), tf.Variable) and self._is_mine(s))

    def _is_mine(self, source: Any) -> bool:
        variable = plain_variable(source)
        made = self._made.get(id(variable))
        return (made is not None and made() is variable) or self._is_trained(variable)

    def _is_within(self, function: Any) -> bool:
        """Returns False in a graph that is built for a session."""
        return function is not None or tf.executing_eagerly()

    def _mark(self, variables: tuple[Any, ...]) -> None:
        function = function_called()
        if function is not None:
            if function not in self._marked:
                self._marked[function] = _Marked(variables, step_here(function_called()))
        elif self._has_begun:
            self._look()
            self._eager = self._eager or _Marked(variables, step_here(function_called()))
            self._window = suspects_of(variables)

    def _look(self) -> None:
        """Ends a window, which began at a gradient."""
        self._windows += any(suspect.is_known_to_have_changed for suspect in self._window)
        self._window = []
        if self._windows >= _WINDOWS and self._eager is not None:
            self._find(self._eager)

    def _find(self, marked: _Marked) -> None:
        self.stop()
        self._on_step(marked.step, [plain_variable(v).name.removesuffix(":0") for v in marked.variables])
