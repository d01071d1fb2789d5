"""Pairs instead of products include every case and every layout."""

from __future__ import annotations

import doctest

import pytest

from tests.unit.kernels import pairs as module
from tests.unit.kernels.pairs import pairs


def test_the_example_is_true() -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("count", [1, 2, 5, 24])
@pytest.mark.parametrize("each", [1, 3])
def test_every_case_is_there_and_every_layout_has_some(count: int, each: int) -> None:
    values = [pair.values for pair in pairs(range(count), ["a", "b", "c"], each)]
    assert len(values) == len(set(values))
    by_layout = {layout: {case for case, its in values if its == layout} for layout in "abc"}
    assert by_layout["c"] == set(range(count))
    assert len(by_layout["a"]) == len(by_layout["b"]) == min(each, count)
    assert count < 2 * each or by_layout["a"].isdisjoint(by_layout["b"])
