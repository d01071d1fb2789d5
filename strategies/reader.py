"""Creates a builder from the YAML file's `strategy` section."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from autodist.strategies.base import BuildsStrategy
from autodist.strategies.build_strategy import describe_failure, require_builder
from autodist.strategies.mesh import Mesh
from autodist.strategies.override import Override, UseAllReduce, UseParameterServer
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.pipeline import Pipeline
from autodist.strategies.placed import PlacedBuilder
from autodist.strategies.registry import find_builder, registered_names

SYNCHRONIZERS: dict[str, type[UseAllReduce | UseParameterServer]] = {
    "AllReduce": UseAllReduce,
    "PS": UseParameterServer,
}

SHARDING = "sharding"
ON_MESH = {SHARDING: "layouts", "slots": "slots", "priority": "priorities"}
"""Settings of a pattern on a mesh, with the option of `Mesh` that has their values by pattern."""

MEANINGS = {
    SHARDING: "the axis of the mesh for each dimension",
    "slots": "the axis of the batch, if it divides the slots of the optimizer alone",
    "priority": "a number for each dimension",
}

DEFAULT = AllReduce.__name__

PlaceOf = Callable[..., Place | None]


def chosen_builder(given: Any, section: StrategySection | None) -> BuildsStrategy:
    """Returns the builder that a script passes, if any, and otherwise the one that the YAML file selects.

    Args:
        given: a builder, or a value that the YAML allows under `strategy`: a name or a mapping; None: none.
        section: the section of the YAML file; None if it has none.

    Raises:
        StrategyError, ResourceSpecError: the value is not a builder, or cannot be used.
    """
    if given is None:
        return builder_from_section(section)
    if isinstance(given, str | Mapping):
        return builder_from_section(StrategySection.from_script(given))
    return require_builder(given)


def builder_from_section(section: StrategySection | None) -> BuildsStrategy:
    """Returns the builder that a YAML file selects; AllReduce without a `strategy` section or a `builder` key.

    A builder from a file is a PlacedBuilder, so that errors in its strategies have a position, too.

    Raises:
        StrategyError: an unknown builder, option or setting (with the nearest known), or a disallowed value; the
            message has its position.
    """
    if section is None:
        return AllReduce()
    name = section.builder or DEFAULT
    maker = find_builder(name, section.place("builder"))
    about = name if section.builder else f"{DEFAULT} (the default builder)"
    of_layouts, others = _divide_patterns(section, maker)
    settings = ON_MESH if issubclass(maker, Mesh) else {SHARDING: ON_MESH[SHARDING]}
    layouts = _by_pattern(section, of_layouts, settings) if issubclass(maker, Mesh | Pipeline) else {}
    tensors = _of_tensors(section) if issubclass(maker, Mesh) else {}
    builder: BuildsStrategy = _make(maker, about, {**section.options, **layouts, **tensors}, section.place)
    if others:
        builder = OverrideVariables(builder, tuple(_override(override, section) for override in others))
    return builder if section.place() is None else PlacedBuilder(builder, section)


def _divide_patterns(
    section: StrategySection, maker: type
) -> tuple[Sequence[VariableOverride], Sequence[VariableOverride]]:
    """Returns the patterns with layouts of variables, and those with settings of their synchronization."""
    if issubclass(maker, Mesh):
        return section.variables, ()
    if not issubclass(maker, Pipeline):
        return (), section.variables
    layouts = [override for override in section.variables if SHARDING in override.settings]
    return layouts, [override for override in section.variables if override not in layouts]


def _by_pattern(
    section: StrategySection, patterns: Sequence[VariableOverride], settings: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Returns the options of a builder that have a value for each pattern of variables.

    Args:
        section: the section of the YAML file.
        patterns: the patterns with settings of a mesh.
        settings: the settings of a pattern, with the options that have their values.
    """
    for key, option in settings.items():
        if option in section.options:
            raise StrategyError(
                f"`{option}` is an option in Python: write `{key}` of patterns under `variables`.",
                section.place(option),
            )
    found: dict[str, dict[str, Any]] = {option: {} for option in settings.values()}
    for override in patterns:
        others = [key for key in override.settings if key not in settings]
        if others or not override.settings:
            raise StrategyError(
                f"The pattern {override.pattern!r} has {listed(others) if others else 'no settings'}, but on a mesh, "
                "the settings of a pattern are "
                f"{listed(f'{key} ({MEANINGS[key]})' for key in settings)}.",
                section.place("variables", override.pattern, *others[:1]),
            )
        for key, value in override.settings.items():
            found[settings[key]][override.pattern] = value
    return found


def _of_tensors(section: StrategySection) -> dict[str, Any]:
    """Returns the option of `Mesh` that has a layout for each pattern of tensors."""
    given = section.options.get("tensors")
    if not isinstance(given, dict):
        return {} if given is None else {"tensors": given}
    for pattern, settings in given.items():
        if not isinstance(settings, dict) or settings.keys() != {SHARDING}:
            raise StrategyError(
                f"The pattern {pattern!r} under `tensors` has {settings!r}. Write {{sharding: […]}} with the axis "
                "of the mesh for each dimension.",
                section.place("tensors", pattern),
            )
    return {"tensors": {pattern: settings[SHARDING] for pattern, settings in given.items()}}


def _override(override: VariableOverride, section: StrategySection) -> Override:
    """Creates the override for a pattern's settings."""
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
    """Creates an object of a class with options from YAML, each checked against its type."""
    try:
        types = option_types(maker)
    except Exception as error:  # unresolvable annotations of a user-defined class, or a hidden constructor
        raise StrategyError(
            f"The options of {about} cannot be determined: {describe_failure(maker, error)}. Correct the class.",
            place(),
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
    except Exception as error:  # a user-defined class
        raise StrategyError(
            f"{about} cannot be made: {describe_failure(maker, error)}. Correct the class or its options.", place()
        ) from error


def _checked(key: str, hint: Any, value: Any, about: str, place: PlaceOf) -> Any:
    nested = nested_options(hint, value)
    if nested is not None:
        nested_class, options = own_class(f"{about}: {key}", *nested, place(key))
        return _make(nested_class, f"{about}: {key}", options, functools.partial(place, key))
    try:
        return option_from_yaml(key, hint, value)
    except StrategyError as error:
        raise StrategyError(f"{about}: {error.problem}", place(key)) from None


def _unknown_option(key: str, types: Mapping[str, Any], about: str) -> str:
    takers = [name for name, maker in _option_takers() if key in option_types(maker)]
    elsewhere = (
        f" It is an option of {listed(dict.fromkeys(takers))}; use one of these, or remove it." if takers else ""
    )
    hint = elsewhere or did_you_mean(key, types)
    return f"{about} has no option {key}.{hint} Its options are {listed(types)}."


def _option_takers() -> Iterator[tuple[str, type]]:
    """Yields the other classes for which an option may have been intended."""
    for name in registered_names():
        yield name, find_builder(name)
    for synchronizer, maker in SYNCHRONIZERS.items():
        yield f"`synchronizer: {synchronizer}` for a pattern", maker
    for kind in registered_compressors():
        yield f"the compressor {kind}", Compressor.named(kind)
