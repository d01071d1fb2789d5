"""Calls of a model's methods, by the names of their parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def with_bound_arguments(
    method: Callable[..., Any], call: Callable[[inspect.BoundArguments], Any]
) -> Callable[..., Any]:
    """A method that passes the arguments of each call to `call`, bound to its parameters.

    A call whose arguments do not fit goes to the method itself, which raises its own TypeError.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return method(*args, **kwargs)
        return call(bound)

    return called


def arguments_of(bound: inspect.BoundArguments) -> Mapping[str, Any]:
    """All that a call passes by name, what is among the rest included."""
    return {**bound.arguments, **bound.arguments.get(_rest(bound.signature) or "", {})}


def takes(signature: inspect.Signature, name: str) -> bool:
    """Returns True if a parameter of this name can be passed."""
    return name in signature.parameters or _rest(signature) is not None


def argument(bound: inspect.BoundArguments, name: str) -> Any:
    """What a call passes for a parameter, be it among the rest; None: nothing."""
    return arguments_of(bound).get(name)


def set_argument(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Lets a call pass another value for a parameter."""
    if name in bound.signature.parameters:
        bound.arguments[name] = value
    else:
        bound.arguments.setdefault(str(_rest(bound.signature)), {})[name] = value


def _rest(signature: inspect.Signature) -> str | None:
    """The parameter that takes all keywords which no other one takes, such as a subclass hands on."""
    return next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
