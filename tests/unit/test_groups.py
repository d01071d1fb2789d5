"""The distribution of tests over parallel test processes."""

import pytest


def test_the_tests_of_a_file_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist identifies groups by the ids of tests, which not every version of pytest allows it to change."""
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith(f"@{__file__}")
