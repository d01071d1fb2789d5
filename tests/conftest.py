"""What holds for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import hypothesis
import pytest

# Before anything imports TensorFlow, and for the processes that tests start: errors and warnings only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# How long an example takes says more of a busy machine than of the code. Before a change is taken, examples are those
# of a fixed seed; elsewhere every run draws others.
hypothesis.settings.register_profile("autodist", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("autodist")


# Before pytest-xdist's own, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run side by side are dealt out in groups: a file's stay in one process, which keeps what it has made.

    Of those that look at what a cluster has trained, each cluster's do, whichever their file.
    """
    for item in items:
        clusters = [repr(mark.args[0]) for mark in item.iter_markers("trains") if mark.args[0] is not None]
        item.add_marker(pytest.mark.xdist_group(clusters[0] if clusters else str(item.path)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--busy-loops", type=int, default=0, help="how many processes compute beside the tests, for ever")


# A loop ends with the process of the tests, however that ends.
_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@pytest.fixture(scope="session", autouse=True)
def busy_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes the machine busy, where that is asked for: tests marked `busy` have to pass then, too."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(request.config.getoption("--busy-loops"))]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()
