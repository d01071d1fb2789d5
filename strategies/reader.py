"""From the YAML's `strategy` section to a builder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autodist.errors import Place, StrategyError
from autodist.resources import StrategySection, VariableOverride
from autodist.strategies.all_reduce import AllReduce
from autodist.strategies.base import BuildsStrategy
from autodist.strategies.nearest import did_you_mean, listed
from autodist.strategies.options import missing_options, option_from_yaml, option_types, takes_any_option
from autodist.strategies.override import Override, OverrideVariables, UseAllReduce, UseParameterServer
from autodist.strategies.registry import find_builder

SYNCHRONIZERS: dict[str, type[UseAllReduce | UseParameterServer]] = {
    "AllReduce": UseAllReduce,
    "PS": UseParameterServer,
}

# Settings that this version knows and cannot carry out, each with the one value that asks for nothing.
LATER_SETTINGS: dict[str, Any] = {
    "compressor": None,
    "local_proxy_variable": False,
    "partition": None,
    "staleness": 0,
    "sync": True,
}

PlaceOf = Callable[..., Place | None]


def builder_from_section(section: StrategySection | None) -> BuildsStrategy:
    """The builder that a YAML asks for; AllReduce if it has no `strategy` section.

    Raises:
        StrategyError: an unknown builder, option or setting (with the nearest known), a value that is not allowed,
            or something that this version cannot do; the message says where it stands.
    """
    if section is None:
        return AllReduce()
    maker = find_builder(section.builder, section.place("builder"))
    builder: BuildsStrategy = _make(maker, section.builder, section.options, section.place)
    overrides = tuple(_override(override, section) for override in section.variables)
    return OverrideVariables(builder, overrides) if overrides else builder


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
    types = option_types(maker)
    values = {}
    for key, value in options.items():
        if key in types:
            values[key] = _checked(key, types[key], value, about, place)
        elif takes_any_option(maker):
            values[key] = value
        elif not _asks_for_nothing(key, value):
            raise StrategyError(_unknown_option(key, value, types, about), place(key))
    missing = missing_options(maker, values)
    if missing:
        raise StrategyError(f"{about} needs {listed(missing)}; add it.", place())
    try:
        return maker(**values)
    except StrategyError as error:
        raise error if error.place else StrategyError(f"{about}: {error.problem}", place()) from error


def _checked(key: str, hint: Any, value: Any, about: str, place: PlaceOf) -> Any:
    try:
        return option_from_yaml(key, hint, value)
    except StrategyError as error:
        raise StrategyError(f"{about}: {error.problem}", place(key)) from None


def _asks_for_nothing(key: str, value: Any) -> bool:
    return key in LATER_SETTINGS and type(value) is type(LATER_SETTINGS[key]) and value == LATER_SETTINGS[key]


def _unknown_option(key: str, value: Any, types: Mapping[str, Any], about: str) -> str:
    if key in LATER_SETTINGS:
        return f"{about}: {key} is {value!r}, and this version of AutoDist cannot do that yet; remove it."
    return f"{about} has no option {key}.{did_you_mean(key, types)} Its options are {listed(types)}."
