from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest

from autodist.errors import StrategyError
from autodist.options.fields import (
    check_options,
    missing_options,
    option_from_yaml,
    option_types,
    takes_any_option,
)

if TYPE_CHECKING:
    from somewhere import Unknown


@dataclass(frozen=True)
class Fields:
    axes: tuple[int, ...]
    kind: Literal["a", "b"] = "a"


class Plain:
    def __init__(self, rate: float, name="x", *, more: Mapping[str, int] | None = None) -> None: ...


class Loose:
    def __init__(self, first: int = 1, **others: Any) -> None: ...


class Untold:
    def __init__(self, thing: "Unknown") -> None: ...


class Bare: ...


def test_options_are_the_fields_of_a_dataclass():
    assert option_types(Fields) == {"axes": tuple[int, ...], "kind": Literal["a", "b"]}
    assert missing_options(Fields, {}) == ["axes"]
    assert missing_options(Fields, {"axes": (0,)}) == []


def test_options_of_a_plain_class_are_its_constructors_parameters():
    assert option_types(Plain) == {"rate": float, "name": Any, "more": Mapping[str, int] | None}
    assert option_types(Bare) == {}
    assert not takes_any_option(Plain)
    assert takes_any_option(Loose)
    assert option_types(Loose) == {"first": int}


def test_a_type_that_only_a_checker_knows_allows_anything():
    assert option_types(Untold) == {"thing": Any}


def test_values_become_what_the_class_wants():
    assert option_from_yaml("axes", tuple[int, ...], [0, 1]) == (0, 1)
    assert option_from_yaml("rate", float, 2) == 2.0
    assert option_from_yaml("thing", Any, {"a": [1]}) == {"a": [1]}


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (int, "3", "x is '3', which is not allowed: input should be a valid integer"),
        (int, True, "x is True"),
        (bool, 1, "x is 1.*valid boolean"),
        (str, 1, "x is 1.*valid string"),
        (tuple[int, ...], ["a"], r"x is \['a'\], which is not allowed: 'a' should be a valid integer"),
        (tuple[tuple[str, ...], ...] | None, ["a", "b"], "not allowed: 'a' should be a list or 'b' should be a list"),
        (dict[str, tuple[str, ...]], {"a": "b"}, "not allowed: 'b' should be a list"),
        (dict[str, int], [2, 2], "not allowed: input should be a mapping"),
        (Literal["a", "b"], "c", "input should be 'a' or 'b'"),
        (int | None, "none", "x is 'none'"),
    ],
)
def test_values_of_another_type_are_refused_not_converted(hint, value, said):
    with pytest.raises(StrategyError, match=said):
        option_from_yaml("x", hint, value)


def test_fields_are_checked_when_they_come_from_python_too():
    check_options(Fields(axes=(0, 1)))
    with pytest.raises(StrategyError, match="kind is 'z'"):
        check_options(Fields(axes=(0,), kind="z"))
