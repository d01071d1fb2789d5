"""Calls of a model's methods, with arguments by the names of the parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def with_bound_arguments(
    method: Callable[..., Any], call: Callable[[inspect.BoundArguments], Any]
) -> Callable[..., Any]:
    """Wraps a method: the bound arguments of each call are passed to `call`.

    A call whose arguments do not fit goes to the method, which raises its own TypeError.
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
    """Returns all arguments of a call by name, those in `**kwargs` included."""
    return {**bound.arguments, **bound.arguments.get(_rest(bound.signature) or "", {})}


def takes(signature: inspect.Signature, name: str) -> bool:
    """Returns True if an argument of this name can be passed."""
    return name in signature.parameters or _rest(signature) is not None


def argument(bound: inspect.BoundArguments, name: str) -> Any:
    """Returns the value of an argument, also one in `**kwargs`; None if it is not passed."""
    return arguments_of(bound).get(name)


def set_argument(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Sets the value of an argument."""
    if name in bound.signature.parameters:
        bound.arguments[name] = value
    else:
        bound.arguments.setdefault(str(_rest(bound.signature)), {})[name] = value


def _rest(signature: inspect.Signature) -> str | None:
    """Returns the name of the `**kwargs` parameter, if there is one."""
    return next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
