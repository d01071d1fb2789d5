from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from autodist.cluster import addresses, command_line, preflight, ssh_connection
from autodist.cluster.given import here

MODULES = [addresses, command_line, here, preflight, ssh_connection]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_hold(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
