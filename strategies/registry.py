"""Registry of builders by name: built-in ones, those registered by a script, and those in a user's module."""

from __future__ import annotations

from typing import Any, TypeVar

from autodist.errors import Place
from autodist.options.registry import Registry

BuilderClass = TypeVar("BuilderClass", bound=type)


def _fault(found: Any) -> str | None:
    if isinstance(found, type) and callable(getattr(found, "build", None)):
        return None
    kind = "class without a method build" if isinstance(found, type) else type(found).__name__
    return (
        f"a {kind}; a builder is a class that derives from autodist.strategies.StrategyBuilder or has "
        "build(graph_item, resource_spec)."
    )


_BUILDERS = Registry("builder", "my_package.MyBuilder", _fault)


def register(builder: BuilderClass) -> BuilderClass:
    """Registers a builder under the name of its class; a decorator for user-defined builders.

        @register
        @dataclass(frozen=True)
        class EverythingAtTheChief(StrategyBuilder):
            def build(self, graph_item, resource_spec):
                return PS(owner=0).build(graph_item, resource_spec)

    Then `strategy: {builder: EverythingAtTheChief}` selects it.

    Raises:
        StrategyError: the class is not a builder, or another class has its name.
    """
    return _BUILDERS.register(builder)


def registered_names() -> tuple[str, ...]:
    """Names of all registered builders, sorted."""
    return _BUILDERS.names()


def find_builder(name: str, place: Place | None = None) -> type:
    """Returns the class that a YAML file's `builder` names.

    Args:
        name: a registered name ("Parallax"), or module and class ("my_package.MyBuilder").
        place: position of the name, for messages.

    Raises:
        StrategyError: there is no such builder, module or attribute, or it is not a builder.
    """
    return _BUILDERS.find(name, place)
