"""The distribution of tests over parallel test processes."""

import pytest


def test_the_tests_of_a_file_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells groups by the ids of tests, which not every version of pytest lets it change."""
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith(f"@{__file__}")
