"""Builders by name: our own, those that a script registers, and those in a user's module."""

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
    return _BUILDERS.register(builder)


def registered_names() -> tuple[str, ...]:
    """Names of all registered builders, sorted."""
    return _BUILDERS.names()


def find_builder(name: str, place: Place | None = None) -> type:
    """The class that a YAML's `builder` names.

    Args:
        name: a registered name ("Parallax"), or module and class ("my_package.MyBuilder").
        place: where the name stands, for messages.

    Raises:
        StrategyError: when there is no such builder, module or attribute, or it is no builder.
    """
    return _BUILDERS.find(name, place)
