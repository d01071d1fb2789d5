"""Checks of the kinds in a graph whose batches are the fixtures `case` and `feeds`."""

from __future__ import annotations

from autodist.layout import Examples, Mean, Unknown

SIZES = (1, 4, 2)
MEAN = Mean(Examples())


def tensor(case, name):
    return case.graph.get_tensor_by_name(f"{name}:0")


def check(case, feeds, expected):
    """Asserts the kind of each tensor, and that the values computed on shards combine as the kind promises."""
    kinds = case.assert_joins([value for value, _ in expected], feeds, SIZES)
    assert kinds == [kind for _, kind in expected]


def reason(case, value):
    kind = case.kind(value)
    assert isinstance(kind, Unknown), kind
    assert value.op.name in kind.reason
    assert value.op.type in kind.reason
    return kind.reason
