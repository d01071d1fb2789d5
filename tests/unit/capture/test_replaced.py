"""Attributes that are others for a while."""

from __future__ import annotations

import pytest

from autodist.capture.patches import all_replaced, definer_of, replaced


class Base:
    """Has one of each kind."""

    def method(self) -> str:
        return "method"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


class Derived(Base):
    """Inherits them."""


def test_all_is_as_it_was_also_after_an_error() -> None:
    before = dict(vars(Base))
    others = [(Base, "method", lambda self: "other"), (Base, "of_class", classmethod(lambda cls: "other"))]
    with pytest.raises(KeyError) as raised, all_replaced(others):
        raise KeyError(Derived().method(), Derived.of_class())
    assert raised.value.args == ("other", "other")
    assert dict(vars(Base)) == before
    assert (Derived().method(), Derived.of_class()) == ("method", "Derived")


def test_what_was_replaced_last_is_put_back_first() -> None:
    with replaced(Base, "method", lambda self: "outer"):
        with replaced(Base, "method", lambda self: "inner"):
            assert Base().method() == "inner"
        assert Base().method() == "outer"
    assert Base().method() == "method"


def test_an_attribute_that_is_not_there_is_replaced_by_nothing() -> None:
    with pytest.raises(AttributeError, match="renamed"), replaced(Base, "renamed", None):
        pass


def test_the_definer_is_the_class_where_the_attribute_stands() -> None:
    assert definer_of(Derived, "method") is Base
