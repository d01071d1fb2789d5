"""Builders' options: told from a class's fields or constructor, and checked against their types."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, InstanceOf, PydanticUserError, TypeAdapter, ValidationError

from autodist.errors import Place, StrategyError


class OptionError(StrategyError):
    """A value of one option cannot be used.

    Args:
        option: its name.
        problem: the value, the reason and the mend.
    """

    def __init__(self, option: str, problem: str) -> None:
        self.option = option
        super().__init__(problem)


def option_types(maker: type) -> dict[str, Any]:
    """Name and type of each option that a class takes; Any where its constructor names no type."""
    hints = _hints(maker if dataclasses.is_dataclass(maker) else inspect.getattr_static(maker, "__init__"))
    return {parameter.name: hints.get(parameter.name, Any) for parameter in _named_parameters(maker)}


def takes_any_option(maker: type) -> bool:
    """Whether a class's constructor ends in **options."""
    parameters = inspect.signature(maker).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def missing_options(maker: type, given: Mapping[str, Any]) -> list[str]:
    """Options that a class needs and that are not given."""
    return [
        parameter.name
        for parameter in _named_parameters(maker)
        if parameter.default is inspect.Parameter.empty and parameter.name not in given
    ]


def option_from_yaml(name: str, hint: Any, value: Any) -> Any:
    """An option's value as the class wants it: a list from YAML becomes a tuple where a tuple is asked for.

    Raises:
        StrategyError: when type or value is not allowed; the message says what is.
    """
    adapter = _adapter(hint)
    if adapter is None:
        return value
    try:
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise _refusal(name, value, error) from None


def nested_options(hint: Any) -> type | None:
    """The dataclass that an option's type is, or has among its alternatives: a mapping in YAML stands for one."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    return next((kind for kind in alternatives if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def check_options(builder: Any) -> None:
    """Checks the fields of a dataclass against their types.

    What stands in a YAML for an option (`"FLOAT16"` or a mapping for a compressor, a list) may be given in Python too,
    and becomes what the field's type says.

    Raises:
        StrategyError: when type or value of a field is not allowed; the message says what is.
    """
    hints = _hints(type(builder))
    for field in dataclasses.fields(builder):
        hint = hints.get(field.name, Any)
        adapter = _adapter(hint)
        if adapter is None:
            continue
        value = _as_in_yaml(field.name, hint, getattr(builder, field.name))
        object.__setattr__(builder, field.name, value)  # it is frozen, and not made yet
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise _refusal(field.name, value, error) from None


def _as_in_yaml(name: str, hint: Any, value: Any) -> Any:
    """An option's value, made of what a YAML may say in its place."""
    nested = nested_options(hint)
    if nested is not None and isinstance(value, str) and hasattr(nested, "shorthand"):
        value = {nested.shorthand: value}
    if nested is not None and isinstance(value, Mapping):
        return make_nested(name, nested, value)
    return option_from_yaml(name, hint, value) if isinstance(value, list) else value


def make_nested(name: str, nested: type, options: Mapping[str, Any]) -> Any:
    """What a mapping stands for as the value of an option.

    Args:
        name: of the option.
        nested: the dataclass that its type is; see `own_class`.
        options: the mapping.

    Raises:
        StrategyError: it has no such options, or not with these values.
    """
    maker, options = own_class(name, nested, options)
    known, needed = option_types(maker), missing_options(maker, options)
    unknown = [key for key in options if key not in known]
    if unknown or needed:
        problem = f"{unknown[0]} is none of them" if unknown else f"{needed[0]} is missing"
        raise StrategyError(
            f"{name} is {dict(options)!r}, and its options are {', '.join(known) or 'none'}: {problem}."
        )
    try:
        return maker(**options)
    except StrategyError as error:
        raise StrategyError(f"{name}: {error.problem}") from None


def own_class(
    name: str, nested: type, options: Mapping[str, Any], place: Place | None = None
) -> tuple[type, Mapping[str, Any]]:
    """The class that a mapping asks for, and what it says to that.

    A class with a method `named` is the base of several, of which the mapping names one under the base's `shorthand`.
    Its method `in_current_names` replaces deprecated names first.

    Raises:
        StrategyError: it names none.
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
    """The annotations of a class or function; none if one names what is imported for type checkers only."""
    try:
        return typing.get_type_hints(source, include_extras=True)
    except NameError:
        return {}


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """What checks a type; None for a type that says nothing of its values, which its builder checks itself."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return TypeAdapter(Annotated[hint, InstanceOf()])
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        return None


def _refusal(name: str, value: Any, error: ValidationError) -> StrategyError:
    wanted = " or ".join(_lower_first(detail["msg"]) for detail in error.errors(include_url=False))
    return StrategyError(f"{name} is {value!r}, which is not allowed: {wanted}.")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
