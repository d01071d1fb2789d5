"""From the YAML's `strategy` section to a builder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autodist.compressors import Compressor, registered_compressors
from autodist.errors import Place, StrategyError
from autodist.logs.formatting import did_you_mean, listed
from autodist.options.fields import (
    missing_options,
    nested_options,
    option_from_yaml,
    option_types,
    own_class,
    takes_any_option,
)
from autodist.resources import StrategySection, VariableOverride
from autodist.strategies.all_reduce import AllReduce
from autodist.strategies.asking import describe_failure, require_builder
from autodist.strategies.base import BuildsStrategy
from autodist.strategies.override import Override, UseAllReduce, UseParameterServer
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.placed import PlacedBuilder
from autodist.strategies.registry import find_builder, registered_names

SYNCHRONIZERS: dict[str, type[UseAllReduce | UseParameterServer]] = {
    "AllReduce": UseAllReduce,
    "PS": UseParameterServer,
}

DEFAULT = AllReduce.__name__

PlaceOf = Callable[..., Place | None]


def chosen_builder(given: Any, section: StrategySection | None) -> BuildsStrategy:
    """The builder that a script gives, if it gives one, and else the one that the YAML asks for.

    Args:
        given: a builder, or what the YAML may have under `strategy`: a name or a mapping; None: none.
        section: of the YAML; None if it has none.

    Raises:
        StrategyError, ResourceSpecError: it is no such thing, or cannot be used.
    """
    if given is None:
        return builder_from_section(section)
    if isinstance(given, str | Mapping):
        return builder_from_section(StrategySection.from_script(given))
    return require_builder(given)


def builder_from_section(section: StrategySection | None) -> BuildsStrategy:
    """The builder that a YAML asks for; AllReduce if it has no `strategy` section, or that names none.

    What comes from a file is a PlacedBuilder, so that what is wrong with its strategies has a place as well.

    Raises:
        StrategyError: an unknown builder, option or setting (with the nearest known), or a value that is not allowed;
            the message says where it stands.
    """
    if section is None:
        return AllReduce()
    name = section.builder or DEFAULT
    maker = find_builder(name, section.place("builder"))
    about = name if section.builder else f"{DEFAULT} (the default builder)"
    builder: BuildsStrategy = _make(maker, about, section.options, section.place)
    overrides = tuple(_override(override, section) for override in section.variables)
    if overrides:
        builder = OverrideVariables(builder, overrides)
    return builder if section.place() is None else PlacedBuilder(builder, section)


def _override(override: VariableOverride, section: StrategySection) -> Override:
    """What a pattern's settings say."""
    place = functools.partial(section.place, "variables", override.pattern)
    about = f"the pattern {override.pattern!r}"
    settings = dict(override.settings)
    synchronizer = settings.pop("synchronizer", None)
    maker = SYNCHRONIZERS.get(synchronizer) if isinstance(synchronizer, str) else None
    if maker is None:
        raise StrategyError(_no_synchronizer(synchronizer, about), place("synchronizer"))
    use = _make(maker, f"{synchronizer} for {about}", settings, place)
    return Override(override.pattern, use, override.place)


def _no_synchronizer(given: Any, about: str) -> str:
    allowed = listed(sorted(SYNCHRONIZERS))
    if given is None:
        return f"The settings of {about} name no synchronizer; add `synchronizer:` with one of {allowed}."
    hint = did_you_mean(str(given), SYNCHRONIZERS)
    return f"The synchronizer of {about} is {given!r}, which is none of {allowed}.{hint}"


def _make(maker: type[Any], about: str, options: Mapping[str, Any], place: PlaceOf) -> Any:
    """An object of a class with options from YAML, each checked against its type."""
    try:
        types = option_types(maker)
    except Exception as error:  # annotations of a user's class that name nothing, a constructor that is hidden
        raise StrategyError(
            f"The options of {about} cannot be told: {describe_failure(maker, error)}. Correct the class.", place()
        ) from error
    values = {}
    for key, value in options.items():
        if key in types:
            values[key] = _checked(key, types[key], value, about, place)
        elif takes_any_option(maker):
            values[key] = value
        else:
            raise StrategyError(_unknown_option(key, types, about), place(key))
    missing = missing_options(maker, values)
    if missing:
        raise StrategyError(f"{about} needs {listed(missing)}; add it.", place())
    try:
        return maker(**values)
    except StrategyError as error:
        raise error if error.place else StrategyError(f"{about}: {error.problem}", place()) from error
    except Exception as error:  # a user's own class
        raise StrategyError(
            f"{about} cannot be made: {describe_failure(maker, error)}. Correct the class or its options.", place()
        ) from error


def _checked(key: str, hint: Any, value: Any, about: str, place: PlaceOf) -> Any:
    nested = nested_options(hint)
    if nested is not None and isinstance(value, str) and hasattr(nested, "shorthand"):
        value = {nested.shorthand: value}
    if nested is not None and isinstance(value, Mapping):
        own, options = own_class(f"{about}: {key}", nested, value, place(key))
        return _make(own, f"{about}: {key}", options, functools.partial(place, key))
    try:
        return option_from_yaml(key, hint, value)
    except StrategyError as error:
        raise StrategyError(f"{about}: {error.problem}", place(key)) from None


def _unknown_option(key: str, types: Mapping[str, Any], about: str) -> str:
    takers = [name for name, maker in _option_takers() if key in option_types(maker)]
    elsewhere = (
        f" It is an option of {listed(dict.fromkeys(takers))}; take one of these, or remove it." if takers else ""
    )
    hint = elsewhere or did_you_mean(key, types)
    return f"{about} has no option {key}.{hint} Its options are {listed(types)}."


def _option_takers() -> Iterator[tuple[str, type]]:
    """What else an option may have been meant for."""
    for name in registered_names():
        yield name, find_builder(name)
    for synchronizer, maker in SYNCHRONIZERS.items():
        yield f"`synchronizer: {synchronizer}` for a pattern", maker
    for kind in registered_compressors():
        yield f"the compressor {kind}", Compressor.named(kind)
