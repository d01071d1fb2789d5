"""The table of patches: every target exists, wrappers act while the context is open, and old packages are rejected."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterable

import pytest

from autodist.errors import UnsupportedVersionError
from autodist.tf_compat import patches
from autodist.tf_compat.patches import INITIALIZER_SEED, Patch, definer_of, patched, put, replaced


class Base:
    """Has a method of each kind."""

    def method(self) -> str:
        return "plain"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    def failing(self) -> None:
        raise KeyError("plain")


class Derived(Base):
    """Inherits them."""


METHOD, OF_CLASS, FAILING = (
    Patch(f"{__name__}:Derived", name, ("keras", "3"), "a test") for name in ("method", "of_class", "failing")
)


def rows_in(value: object) -> Iterable[Patch]:
    if isinstance(value, Patch):
        return [value]
    if isinstance(value, dict):
        return rows_in([*value.values()])
    return [row for row in value if isinstance(row, Patch)] if isinstance(value, list) else []


TABLE = [row for value in vars(patches).values() for row in rows_in(value)]


def test_the_table_has_each_target_once() -> None:
    owners = [(row.owner(), row.method) for row in TABLE if row.exists]
    assert len(owners) > 50
    assert all(owners.count(one) == 1 for one in owners)


METHODS = [row for row in TABLE if row is not INITIALIZER_SEED and row.exists]
"""The rows of methods that are installed; the other one is of an attribute of instances."""


@pytest.mark.parametrize("row", METHODS, ids=lambda row: f"{row.path}.{row.method}")
def test_a_target_of_the_table_exists_and_is_put_back_after_an_error(row: Patch) -> None:
    owner = row.owner()
    plain = vars(owner)[row.method]
    assert hasattr(pkgutil.resolve_name(row.path), row.method)
    with contextlib.suppress(KeyError), patched({row: lambda plain, *args, **kwargs: plain(*args, **kwargs)}):
        assert vars(owner)[row.method] is not plain
        raise KeyError
    assert vars(owner)[row.method] is plain


def test_a_row_says_if_the_installed_package_has_its_method() -> None:
    assert [Patch("keras:Model", "fit", ("keras", version), "a test").exists for version in ("3", "99")] == [
        True,
        False,
    ]


def test_a_method_is_wrapped_in_its_defining_class_while_the_context_is_open() -> None:
    before = dict(vars(Base))
    with patched(
        {METHOD: lambda plain, self: f"ours, {plain(self)}", OF_CLASS: lambda plain, cls: f"ours, {plain(cls)}"}
    ):
        assert Base().method() == Derived().method() == "ours, plain"
        assert (Base.of_class(), Derived.of_class()) == ("ours, Base", "ours, Derived")
    assert dict(vars(Base)) == before
    assert "method" not in vars(Derived)


def test_the_traceback_of_an_error_has_no_frame_of_the_installer() -> None:
    with patched({FAILING: lambda plain, self: plain(self)}), pytest.raises(KeyError) as raised:
        Derived().failing()
    assert [frame.name for frame in raised.traceback][1:] == ["<lambda>", "failing"]


def test_an_older_package_is_refused_with_the_command_that_upgrades_it() -> None:
    row = Patch(f"{__name__}:Base", "method", ("keras", "99"), "a test")
    with (
        pytest.raises(UnsupportedVersionError, match="keras 3.* is installed.*pip install 'keras>=99'"),
        patched({METHOD: lambda plain, self: "ours", row: lambda plain, self: "ours"}),
    ):
        pass
    assert Base().method() == "plain"


def test_the_last_replacement_is_put_back_first() -> None:
    with replaced(Base, "method", lambda self: "outer"):
        with replaced(Base, "method", lambda self: "inner"):
            assert Base().method() == "inner"
        assert Base().method() == "outer"
    assert Base().method() == "plain"


def test_an_attribute_that_does_not_exist_cannot_be_replaced() -> None:
    with pytest.raises(AttributeError, match="renamed"), replaced(Base, "renamed", None):
        pass


def test_definer_of_returns_the_class_that_defines_an_attribute() -> None:
    assert definer_of(Derived, "method") is Base


def test_a_replacement_is_put_into_the_defining_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "method", METHOD.plain())
    put(METHOD, lambda self: "ours")
    assert Base().method() == Derived().method() == "ours"
    assert "method" not in vars(Derived)


def test_an_attribute_of_instances_belongs_to_the_class_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INITIALIZER_SEED.owner(), INITIALIZER_SEED.method, None, raising=False)
    assert INITIALIZER_SEED.owner() is pkgutil.resolve_name(INITIALIZER_SEED.path)
    assert definer_of(Derived, "of_instances") is Derived
