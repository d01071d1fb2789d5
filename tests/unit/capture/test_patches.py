"""Patches stand where a method is defined, for a while, and in versions that have it alone."""

from __future__ import annotations

import pytest

from autodist.capture.patches import Patch, patched
from autodist.errors import UnsupportedVersionError


class Base:
    """Has a method."""

    def method(self) -> str:
        return "plain"


class Derived(Base):
    """Inherits it."""


def test_a_method_is_replaced_where_it_is_defined_and_only_while_the_table_is_open() -> None:
    row = Patch(Derived, "method", lambda plain: lambda self: f"ours around {plain(self)}", ("keras", "3"))
    with patched([row]):
        assert Base().method() == Derived().method() == "ours around plain"
    assert Base().method() == "plain"
    assert "method" not in vars(Derived)


def test_a_package_that_is_older_than_a_row_asks_for_is_refused_with_the_command() -> None:
    with (
        pytest.raises(UnsupportedVersionError, match="keras 3.* is installed.*pip install 'keras>=99'"),
        patched([Patch(Base, "method", lambda plain: plain, ("keras", "99"))]),
    ):
        pass
    assert Base().method() == "plain"
