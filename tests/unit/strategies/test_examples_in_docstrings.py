import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["autodist.nearest", "autodist.strategies.cut", "autodist.strategies.table"])
def test_examples_show_what_happens(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
