"""Hooks that detect local training: gradients of variables, and their application, outside of distributed steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import keras
import tensorflow as tf
from tensorflow.python.client.session import BaseSession  # base class of all sessions

from autodist.capture.keras.libraries import legacy_keras
from autodist.tf_compat.patches import (
    FUNCTION_CALL,
    GRAPH_GRADIENTS,
    LEGACY_OPTIMIZER_APPLIES,
    OPTIMIZER_APPLY,
    OPTIMIZER_V1_APPLY,
    SESSION_CALLABLE,
    SESSION_RUN,
    TAPE_GRADIENT,
    Installed,
    Patch,
    install,
)


class Listener(Protocol):
    """Receives events outside of distributed steps."""

    def on_applied(self, variables: Sequence[Any]) -> None:
        """Called when an optimizer applies gradients."""

    def on_gradients(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Called when gradients of variables are computed."""

    def on_run(self, session: BaseSession, fetches: Any) -> None:
        """Called for each run of a session."""

    def around_call(self, function: Any, call: Callable[[], Any]) -> Any:
        """Called for an eager call of a `tf.function`; returns the result of `call`."""


listeners: list[Listener] = []

_hooks: list[Installed] = []
"""The installed hooks while there are listeners."""

_warnings: ContextVar[list[Callable[[], None]] | None] = ContextVar("warnings", default=None)
"""While a distributed step is traced, the warnings that apply if it trains; otherwise None."""

_called: ContextVar[Any] = ContextVar("called", default=None)


@contextlib.contextmanager
def distributing() -> Iterator[list[Callable[[], None]]]:
    """Marks the capture of a distributed step: gradients that are computed and applied in it are not local.

    Yields the warnings added by `warn_if_it_trains`.
    """
    warnings: list[Callable[[], None]] = []
    token = _warnings.set(warnings)
    try:
        yield warnings
    finally:
        _warnings.reset(token)


def is_distributing() -> bool:
    """Returns True while a distributed step is captured."""
    return _warnings.get() is not None


def warn_if_it_trains(warn: Callable[[], None]) -> None:
    """If a distributed step is being captured, calls `warn` after its trace if the step computes gradients."""
    warnings = _warnings.get()
    if warnings is not None:
        warnings.append(warn)


def function_called() -> Any:
    """Returns the outermost `tf.function` that is being called or traced, or None."""
    return _called.get()


def listen(listener: Listener) -> None:
    """Adds a listener."""
    listeners.append(listener)
    install_hooks()


def stop_listening(listener: Listener) -> None:
    """Removes a listener. May be called twice."""
    if listener in listeners:
        listeners.remove(listener)
    put_back()


def install_hooks() -> None:
    """Installs the hooks if there are listeners; a later call includes modules that the script has imported since."""
    if not listeners:
        return
    _hook(OPTIMIZER_APPLY, _apply)
    _hook(OPTIMIZER_V1_APPLY, _apply_gradients)
    if legacy_keras() is not None:
        for row in LEGACY_OPTIMIZER_APPLIES:
            _hook(row, _apply_gradients)
    _hook(TAPE_GRADIENT, _tape_gradient)
    _hook(GRAPH_GRADIENTS, _graph_gradients)
    _hook(SESSION_RUN, _run)
    _hook(SESSION_CALLABLE, _make_callable)
    _hook(FUNCTION_CALL, _call)


def _hook(row: Patch, wrapper: Callable[..., Any]) -> None:
    owner = row.owner()
    if not any(hook.owner is owner and hook.method == row.method for hook in _hooks):
        _hooks.append(install(row, wrapper))


def put_back() -> None:
    """Removes the hooks if there are no listeners.

    In a scope that has replaced a hooked method, the hooks stay until the end of the scope, which calls this again.
    """
    if not listeners and all(hook.is_current for hook in _hooks):
        for hook in _hooks:
            hook.remove()
        _hooks.clear()


def _notify(event: Callable[[Listener], None]) -> None:
    if not is_distributing():
        for one in list(listeners):
            event(one)


def _apply(plain: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
    if listeners:
        applied = getattr(self, "_trainable_variables", ()) if trainable_variables is None else trainable_variables
        _notify(lambda one: one.on_applied([*applied]))
    return plain(self, grads, trainable_variables, **kwargs)


def _apply_gradients(plain: Callable[..., Any], self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    if listeners:
        grads_and_vars = [*grads_and_vars]
        _notify(lambda one: one.on_applied([variable for _, variable in grads_and_vars]))
    return plain(self, grads_and_vars, *args, **kwargs)


def _tape_gradient(
    plain: Callable[..., Any], self: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    found = plain(self, target, sources, *args, **kwargs)
    _note(sources, found)
    return found


def _graph_gradients(plain: Callable[..., Any], ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    found = plain(ys, xs, *args, **kwargs)
    _note(xs, found)
    return found


def _note(sources: Any, gradients: Any) -> None:
    if listeners:
        flat = tf.nest.flatten(sources)
        if any(_is_variable(source) for source in flat):
            made = tf.nest.flatten(gradients)
            _notify(lambda one: one.on_gradients(flat, made))


def _is_variable(source: Any) -> bool:
    return isinstance(source, tf.Variable | keras.Variable) or getattr(source, "dtype", None) == tf.resource


def _run(plain: Callable[..., Any], self: BaseSession, fetches: Any, *args: Any, **kwargs: Any) -> Any:
    if listeners:
        _notify(lambda one: one.on_run(self, fetches))
    return plain(self, fetches, *args, **kwargs)


def _make_callable(plain: Callable[..., Any], self: BaseSession, fetches: Any, *args: Any, **kwargs: Any) -> Any:
    made = plain(self, fetches, *args, **kwargs)

    def call(*values: Any, **options: Any) -> Any:
        if listeners:
            _notify(lambda one: one.on_run(self, fetches))
        return made(*values, **options)

    return call


def _call(plain: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not listeners or _called.get() is not None or is_distributing() or not tf.executing_eagerly():
        return plain(self, *args, **kwargs)
    token = _called.set(self)
    try:
        made: Callable[[], Any] = functools.partial(plain, self, *args, **kwargs)
        for one in list(listeners):
            made = functools.partial(one.around_call, self, made)
        return made()
    finally:
        _called.reset(token)
