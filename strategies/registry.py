"""Builders by name: our own, those that a script registers, and those in a user's module."""

from __future__ import annotations

import importlib
import traceback
from typing import Any, TypeVar

from autodist.errors import Place, StrategyError
from autodist.strategies.nearest import did_you_mean, listed, nearest

_BUILDERS: dict[str, type] = {}

BuilderClass = TypeVar("BuilderClass", bound=type)


def register(builder: BuilderClass) -> BuilderClass:
    """Makes a builder known by its class's name; a decorator for a user's own.

        @register
        @dataclass(frozen=True)
        class EverythingAtTheChief(StrategyBuilder):
            def build(self, graph_item, resource_spec):
                return PS(owner=0).build(graph_item, resource_spec)

    Then `strategy: {builder: EverythingAtTheChief}` finds it.

    Raises:
        StrategyError: when it is no builder, or another class has the name already.
    """
    _as_builder(builder, getattr(builder, "__qualname__", repr(builder)), None)
    known = _BUILDERS.setdefault(builder.__name__, builder)
    # A module that is reloaded, as in a notebook, brings the same class again, which is no clash.
    if known is not builder and (known.__module__, known.__qualname__) != (builder.__module__, builder.__qualname__):
        raise StrategyError(
            f"A builder named {builder.__name__} is registered already, from {known.__module__}; "
            f"give the one in {builder.__module__} another name."
        )
    _BUILDERS[builder.__name__] = builder
    return builder


def registered_names() -> tuple[str, ...]:
    """Names of all registered builders, sorted."""
    return tuple(sorted(_BUILDERS))


def find_builder(name: str, place: Place | None = None) -> type:
    """The class that a YAML's `builder` names.

    Args:
        name: a registered name ("Parallax"), or module and class ("my_package.MyBuilder").
        place: where the name stands, for messages.

    Raises:
        StrategyError: when there is no such builder, module or attribute, or it is no builder.
    """
    if name in _BUILDERS:
        return _BUILDERS[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in name.split(".")):
        raise StrategyError(
            f"There is no builder named {name}.{did_you_mean(name, _BUILDERS)} Known are {listed(registered_names())}; "
            "name your own with its module, as in my_package.MyBuilder.",
            place,
        )
    return _as_builder(_attribute(_module(module_name, place), attribute, place), name, place)


def _module(name: str, place: Place | None) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise StrategyError(f"The builder's module {name} cannot be imported: {error}.", place) from error
        raise StrategyError(
            f"There is no module {error.name}. It must stand beside the script or be installed.", place
        ) from error
    except ImportError as error:
        raise StrategyError(f"The builder's module {name} cannot be imported: {error}.", place) from error
    except Exception as error:  # whatever a user's own module does
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({frame.filename}:{frame.lineno})"
        raise StrategyError(
            f"The builder's module {name} cannot be imported: {type(error).__name__}: {error}{where}. Correct it.",
            place,
        ) from error


def _attribute(module: Any, name: str, place: Place | None) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    classes = [key for key, value in vars(module).items() if isinstance(value, type)]
    hint = did_you_mean(name, classes) or f" The nearest classes there are {listed(nearest(name, classes))}."
    raise StrategyError(f"The module {module.__name__} has no {name}.{hint}", place)


def _as_builder(found: Any, name: str, place: Place | None) -> type:
    if isinstance(found, type) and callable(getattr(found, "build", None)):
        return found
    kind = "class without a method build" if isinstance(found, type) else type(found).__name__
    raise StrategyError(
        f"{name} is no builder but a {kind}; a builder is a class that derives from "
        "autodist.strategies.StrategyBuilder or has build(graph_item, resource_spec).",
        place,
    )
