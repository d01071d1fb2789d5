"""Options of builders: derived from a class's fields or constructor, and checked against their types."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, InstanceOf, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from autodist.errors import Place, StrategyError


class OptionError(StrategyError):
    """Error: the value of an option is not usable.

    Args:
        option: its name.
        problem: the value, the reason and the fix.
    """

    def __init__(self, option: str, problem: str) -> None:
        self.option = option
        super().__init__(problem)


def option_types(maker: type) -> dict[str, Any]:
    """Returns name and type of each option of a class; Any if its constructor has no annotation."""
    hints = _hints(maker if dataclasses.is_dataclass(maker) else inspect.getattr_static(maker, "__init__"))
    return {parameter.name: hints.get(parameter.name, Any) for parameter in _named_parameters(maker)}


def takes_any_option(maker: type) -> bool:
    """Returns True if a class's constructor ends in **options."""
    parameters = inspect.signature(maker).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def missing_options(maker: type, given: Mapping[str, Any]) -> list[str]:
    """Returns the options that a class requires and `given` lacks."""
    return [
        parameter.name
        for parameter in _named_parameters(maker)
        if parameter.default is inspect.Parameter.empty and parameter.name not in given
    ]


def option_from_yaml(name: str, hint: Any, value: Any) -> Any:
    """Converts an option's value from YAML to its type: a list becomes a tuple if the type is one.

    Raises:
        StrategyError: type or value is not allowed; the message lists the allowed ones.
    """
    adapter = _adapter(hint)
    if adapter is None:
        return value
    try:
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise _validation_error(name, value, error) from None


def nested_options(hint: Any, value: Any) -> tuple[type, Mapping[str, Any]] | None:
    """Returns the dataclass in an option's type, alone or in a union, and its options if the value is their YAML form.

    That form is a mapping, or the value of the class's `shorthand` alone.
    """
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    nested = next((kind for kind in alternatives if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
    if nested is not None and isinstance(value, str) and hasattr(nested, "shorthand"):
        value = {nested.shorthand: value}
    return (nested, value) if nested is not None and isinstance(value, Mapping) else None


def check_options(builder: Any) -> None:
    """Checks the fields of a dataclass against their types.

    An option may also have its YAML form (`"FLOAT16"` or a mapping for a compressor, a list); it is converted to the
    field's type.

    Raises:
        StrategyError: type or value of a field is not allowed; the message lists the allowed ones.
    """
    hints = _hints(type(builder))
    for field in dataclasses.fields(builder):
        hint = hints.get(field.name, Any)
        adapter = _adapter(hint)
        if adapter is None:
            continue
        value = _from_yaml_form(field.name, hint, getattr(builder, field.name))
        object.__setattr__(builder, field.name, value)  # it is frozen and under construction
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise _validation_error(field.name, value, error) from None


def _from_yaml_form(name: str, hint: Any, value: Any) -> Any:
    """Converts an option's value from its YAML form, if it has one."""
    nested = nested_options(hint, value)
    if nested is not None:
        return make_nested(name, *nested)
    return option_from_yaml(name, hint, value) if isinstance(value, list) else value


def make_nested(name: str, nested: type, options: Mapping[str, Any]) -> Any:
    """Returns the object that a mapping stands for as the value of an option.

    Args:
        name: the name of the option.
        nested: the dataclass of its type; see `own_class`.
        options: the mapping.

    Raises:
        StrategyError: it has no such options, or not with these values.
    """
    maker, options = own_class(name, nested, options)
    known, needed = option_types(maker), missing_options(maker, options)
    unknown = [key for key in options if key not in known]
    if unknown or needed:
        problem = f"{unknown[0]} is not one of them" if unknown else f"{needed[0]} is missing"
        raise StrategyError(
            f"{name} is {dict(options)!r}, but its options are {', '.join(known) or 'none'}: {problem}."
        )
    try:
        return maker(**options)
    except StrategyError as error:
        raise StrategyError(f"{name}: {error.problem}") from None


def own_class(
    name: str, nested: type, options: Mapping[str, Any], place: Place | None = None
) -> tuple[type, Mapping[str, Any]]:
    """Returns the class that a mapping names, and the other options.

    A class with a method `named` is the base of several; the mapping names one of them under the base's `shorthand`.
    Its method `in_current_names` replaces deprecated names first.

    Raises:
        StrategyError: the name is missing.
    """
    if not (hasattr(nested, "named") and hasattr(nested, "shorthand") and hasattr(nested, "in_current_names")):
        return nested, options
    rest: dict[str, Any] = nested.in_current_names(options)
    kind = rest.pop(nested.shorthand, None)
    if not isinstance(kind, str):
        problem = "needs" if kind is None else f"has {kind!r} for"
        raise StrategyError(f"{name} {problem} {nested.shorthand}; add its name.", place)
    return nested.named(kind, place), rest


def _named_parameters(maker: type) -> list[inspect.Parameter]:
    wanted = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter for parameter in inspect.signature(maker).parameters.values() if parameter.kind in wanted]


def _hints(source: Any) -> dict[str, Any]:
    """Returns the annotations of a class or function; none if one is imported for type checkers only."""
    try:
        return typing.get_type_hints(source, include_extras=True)
    except NameError:
        return {}


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """Returns the validator of a type; None for a type without one, whose values its builder checks."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return TypeAdapter(Annotated[hint, InstanceOf()])
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        return None


def _validation_error(name: str, value: Any, error: ValidationError) -> StrategyError:
    reasons = dict.fromkeys(_reason(value, detail) for detail in error.errors(include_url=False))
    return StrategyError(f"{name} is {value!r}, which is not allowed: {' or '.join(reasons)}.")


def _reason(value: Any, detail: ErrorDetails) -> str:
    """Returns what is wrong with an option's value, or the element of it that is wrong, in the words of YAML."""
    reason = _lower_first(detail["msg"])
    for of_pydantic, of_yaml in _YAML_WORDS.items():
        reason = reason.replace(of_pydantic, of_yaml)
    element = repr(detail["input"])
    return reason if element == repr(value) else reason.replace("input", element, 1)


_YAML_WORDS = {
    "valid array": "list", "valid tuple": "list", "valid list": "list",
    "valid object": "mapping", "valid dictionary": "mapping", "an object": "a mapping",
}  # fmt: skip
"""The words of YAML for those of pydantic."""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
