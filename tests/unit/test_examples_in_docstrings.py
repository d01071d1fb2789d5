"""The examples in docstrings run with the shown results."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import autodist
import autodist.kernels
import autodist.strategies

_PACKAGES = (autodist, autodist.kernels, autodist.strategies)  # separate folders in an editable install


def _modules_with_examples() -> set[str]:
    found = set()
    for package in _PACKAGES:
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        for file in folder.rglob("*.py"):
            if ">>> " in file.read_text(encoding="utf-8"):
                found.add(".".join((package.__name__, *file.relative_to(folder).with_suffix("").parts)))
    return found


@pytest.mark.parametrize("name", sorted(_modules_with_examples()))
def test_examples_show_what_happens(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
