"""The names that are sent with a function, and those that cannot be."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from autodist.notebook.uses import find_unpicklable, sets, uses

CELL = """
import math

class Trainer:
    def __init__(self):
        self.rate, self.source = 1, lock

    def train(self, ad):
        return self.source

trainer = Trainer()

def helper(x):
    return [math.sqrt(lock) for _ in x]

def train(ad, more=data):
    def inner():
        return helper(x) + train(None)
    return inner() + ad.x.lock

def recursive(ad):
    return recursive(lock)

def make():
    if False:
        later = 1
    return lambda ad: (x, later)

def counts(ad):
    global count
    def inner():
        global total
        total = 1
    count = count + 1

in_tuple = (1, {"a": [lock]})
"""


@pytest.fixture
def cell() -> dict[str, Any]:
    """Names of a notebook in which a cell was run."""
    names: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock(), "data": np.ones(3), "x": 1, "ad": 2}
    exec(compile(CELL, "<cell>", "exec"), names)  # noqa: S102 - as a notebook does
    return names


def test_what_a_function_reads_is_known_by_name(cell: dict[str, Any]) -> None:
    assert {name: type(value).__name__ for name, value in uses(cell["train"]).items()} == {
        "helper": "function", "x": "int", "train": "function", "more": "ndarray",
    }  # fmt: skip
    assert uses(cell["train"], (5,))["more"] == 5
    assert uses(cell["make"]()) == {"x": 1}  # `later` has no value
    assert uses(np.linalg.norm, (3,)).keys() <= {"ord", "argument 1", "axis", "keepdims"}
    assert uses(dict, (3,)) == {"argument 1": 3}  # it has no signature


def test_names_that_a_function_assigns_around_it_are_known(cell: dict[str, Any]) -> None:
    assert sets(cell["counts"]) == ("count", "total")
    assert sets(cell["train"]) == sets(np.sin) == sets(functools.partial(cell["counts"])) == ()


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda cell: cell["train"], "helper → lock"),
        (lambda cell: cell["trainer"].train, "self.source"),
        (lambda cell: functools.partial(cell["counts"], more=cell["lock"]), "more"),
        (lambda cell: functools.partial(cell["helper"], 1), "lock"),
        (lambda cell: lambda ad, given=cell["in_tuple"]: given, "given[1]['a'][0]"),
        (lambda cell: cell["recursive"], "lock"),
    ],
)
def test_the_way_to_what_stays_is_told(
    cell: dict[str, Any], make: Callable[[Mapping[str, Any]], Any], way: str
) -> None:
    lock = cell["lock"]

    def goes(value: Any) -> bool:
        if isinstance(value, dict | list | tuple):
            return all(goes(part) for part in (value.values() if isinstance(value, dict) else value))
        return value not in (lock, cell["helper"], cell["recursive"], cell["trainer"])

    assert find_unpicklable(make(cell), (), goes) == (way, lock)


def test_nothing_is_told_where_all_goes(cell: dict[str, Any]) -> None:
    assert find_unpicklable(cell["train"], (), lambda value: True) == ("", cell["train"])
    assert find_unpicklable(cell["train"], (cell["lock"],), lambda value: value is not cell["lock"]) == (
        "more",
        cell["lock"],
    )
