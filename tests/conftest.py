"""Configuration of all tests."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Before anything imports TensorFlow, and for the processes that tests start: errors and warnings only.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# oneDNN is on by default on some processors only. Its kernels need other memory than TensorFlow's own, and round
# otherwise.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# Hundreds of processes import what tests are made of, those that tests start among them. So what is imported up to the
# end of the collection is compiled once, also where Python is told to leave no files.
_leaves_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False

# A job in the background of a shell ignores SIGINT, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The collector of garbage would go through what is imported again and again, while that grows and in every test.
gc.set_threshold(20_000, 10, 10)

# How long an example takes says more of a busy machine than of the code. Before a change is taken, examples are those
# of a fixed seed, the same in every run, so fewer are enough; elsewhere every run draws others. Few of them tell other
# versions of libraries apart (`--hypothesis-profile few`).
_IS_FIXED = "CI" in os.environ
hypothesis.settings.register_profile(
    "autodist", deadline=None, print_blob=True, derandomize=_IS_FIXED, max_examples=25 if _IS_FIXED else 100
)
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("autodist"), max_examples=20)
hypothesis.settings.load_profile("autodist")


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = _leaves_no_bytecode
    gc.freeze()


# Begins before pytest-xdist's own, which reads the groups, and ends after pytest's own, which has left out by marks.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Groups tests for parallel runs: the tests of a file run in one process, which caches their fixtures.

    All tests that check a training run on the same machines form a group, across files. Tests that start processes and
    share nothing are scheduled one by one, since some take longer than other files. They come last, and the fast ones
    of them at the very end, so that no process waits for a long one.
    """
    for mark in ("processes", "busy"):
        _find_unsaid(mark, [item.path for item in items if item.get_closest_marker(mark)])
    short = []
    for item in items:
        clusters = [mark.args[0] for mark in item.iter_markers("trains")]
        machines = [str(cluster.machines) for cluster in clusters if cluster is not None]
        if clusters or item.get_closest_marker("processes") is None or _shares_what_its_file_has_made(item):
            item.add_marker(pytest.mark.xdist_group(machines[0] if machines else str(item.path)))
        elif item.get_closest_marker("slow") is None:
            short.append(item)
    items.sort(key=set(short).__contains__)
    yield
    kept = _with_one_case(items, [Path(folder).resolve() for folder in config.getoption("one_case")])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = kept.values()


def _shares_what_its_file_has_made(step: pytest.Item) -> bool:
    known = step._fixtureinfo.name2fixturedefs if isinstance(step, pytest.Function) else {}
    return any(fixtures[-1].scope in {"class", "module", "package"} for fixtures in known.values())


def _find_unsaid(mark: str, paths: list[Path]) -> None:
    """Raises UsageError if `scripts/test`, which finds the files of a mark by their text, would miss one."""
    for path in dict.fromkeys(paths):
        if f"mark.{mark}" not in path.read_text(encoding="utf-8"):
            raise pytest.UsageError(f"{path} has no `mark.{mark}`, by which scripts/test finds what it marks.")


def _with_one_case(items: list[pytest.Item], folders: list[Path]) -> dict[str, pytest.Item]:
    """Returns the remaining tests, by id, if tests in some folders run only with their first case."""
    by_test: dict[str, pytest.Item] = {}
    for item in items:
        has_one = any(item.path.is_relative_to(folder) for folder in folders)
        by_test.setdefault(item.nodeid.split("[")[0] if has_one else item.nodeid, item)
    return {item.nodeid: item for item in by_test.values()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--busy-loops", type=int, default=0, help="how many processes compute beside the tests, for ever")
    parser.addoption(
        "--one-case", action="append", default=[], metavar="PATH", help="of each test there run the first case alone"
    )


# A loop ends with the process of the tests, however that ends.
_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"

_loops: list[subprocess.Popen[bytes]] = []
_to_begin: list[list[str]] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keeps the machine busy on request: tests marked `busy` have to pass under load, too.

    If tests run in parallel, the distributing process starts the load, because it ends last.
    """
    if not hasattr(session.config, "workerinput"):
        _to_begin.extend([[sys.executable, "-c", _LOOP]] * session.config.getoption("--busy-loops"))


def pytest_runtest_logstart() -> None:
    """Starts the busy loops with the first test, since all processes import the same modules before, for their
    collection.
    """
    while _to_begin:
        _loops.append(subprocess.Popen(_to_begin.pop()))


def pytest_sessionfinish() -> None:
    for loop in _loops:
        loop.kill()
        loop.wait()
    _loops.clear()
