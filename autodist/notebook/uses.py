"""Finds the variables that a function uses from its surroundings, by name."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any


def uses(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Returns the values that a function uses, by name: arguments, defaults, and variables from its surroundings.

    Args:
        function: the function, called with one value before `args`.
        args: the arguments of the function.
    """
    return dict(_of_function(function)) | dict(_of_arguments(function, args))


def sets(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the global variables that a function assigns, which changes them only in the process where it runs."""
    code = getattr(function, "__code__", None)
    return tuple(dict.fromkeys(_globals_of(code, ("STORE_GLOBAL", "DELETE_GLOBAL")))) if code is not None else ()


def find_unpicklable(
    function: Callable[..., Any], args: tuple[Any, ...], can_pickle: Callable[[Any], bool]
) -> tuple[str, Any]:
    """Returns the first value used by a function that cannot be pickled, as deep as names go, with the path to it.

    >>> settings = {"rate": 1.0, "lock": "a lock"}
    >>> find_unpicklable(lambda ad: settings, (), lambda value: "lock" not in str(value))
    ("settings['lock']", 'a lock')

    Args:
        function: see `uses`.
        args: see `uses`.
        can_pickle: returns True if a value, with all its content, can be pickled.
    """
    return _find_stuck("", function, uses(function, args), can_pickle, {id(function)})


def _find_stuck(
    path: str, value: Any, parts: Mapping[str, Any], can_pickle: Callable[[Any], bool], seen: set[int]
) -> tuple[str, Any]:
    for name, part in parts.items():
        if id(part) not in seen and not can_pickle(part):
            seen.add(id(part))
            # An arrow precedes a variable that a function uses; a part of a value follows the value's name.
            further = f"{path}{name}" if name.startswith(("[", ".")) else f"{path} → {name}" if path else name
            return _find_stuck(further, part, dict(_parts(part)), can_pickle, seen)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a value; none for objects of libraries, whose internals do not help the user."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, FunctionType | MethodType | functools.partial):
        yield from _of_function(value)
    elif type(value).__module__ == "__main__":
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _of_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    try:
        bound = inspect.signature(function).bind(None, *args).arguments
    except (TypeError, ValueError):  # for example a C function, which has no signature
        yield from ((f"argument {index}", value) for index, value in enumerate(args, 1))
        return
    yield from list(bound.items())[1:]


def _of_function(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from _of_function(function.func)
        yield from ((f"argument {index}", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _of_function(function.__func__)
    elif isinstance(function, FunctionType) and not _is_imported(function):
        yield from _of_closure(function)
        read = dict.fromkeys(_globals_of(function.__code__, ("LOAD_GLOBAL", "LOAD_NAME")))
        yield from ((name, function.__globals__[name]) for name in read if name in function.__globals__)
        parameters = inspect.signature(function).parameters.values()
        yield from ((p.name, p.default) for p in parameters if p.default is not p.empty)


def _of_closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # the enclosing function has not assigned it yet


def _is_imported(function: FunctionType) -> bool:
    """Returns True if the function is importable from its module, so that only its name is pickled."""
    module = sys.modules.get(function.__module__ or "")
    return function.__module__ != "__main__" and getattr(module, function.__name__, None) is function


def _globals_of(code: CodeType, steps: tuple[str, ...]) -> Iterator[str]:
    """Yields the global names that a function, or a nested one, uses in the given bytecode instructions."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in steps)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant, steps)
