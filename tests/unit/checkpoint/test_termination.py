"""SIGTERM during a save, in a process that does not handle it, leaves no unfinished checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from autodist.checkpoint import termination
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.termination import RemovedOnTermination


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Returns the signals that were raised again, each with its handler at that moment."""
    signals: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        termination.signal, "raise_signal", lambda number: signals.append((number, signal.getsignal(number)))
    )
    return signals


def terminate() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler)
    handler(signal.SIGTERM, None)


def test_sigterm_removes_the_temporary_folder_and_ends_the_process_by_the_signal(
    tmp_path: Path, raised: list[tuple[int, Any]]
) -> None:
    with Folder(tmp_path).unfinished() as made:
        (Path(made) / "part-0").touch()
        terminate()
        assert (os.listdir(tmp_path), raised) == ([], [(signal.SIGTERM, signal.SIG_DFL)])


def test_the_default_comes_back_after_a_save(tmp_path: Path) -> None:
    with Folder(tmp_path).unfinished():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_save_that_ends_in_another_thread_leaves_a_handler_that_ends_the_process_until_the_main_thread_looks(
    tmp_path: Path, raised: list[tuple[int, Any]]
) -> None:
    stack = ExitStack()
    stack.enter_context(Folder(tmp_path).unfinished())
    thread = threading.Thread(target=stack.close)
    thread.start()
    thread.join()
    terminate()
    assert raised == [(signal.SIGTERM, signal.SIG_DFL)]
    signal.signal(signal.SIGTERM, RemovedOnTermination._end)
    RemovedOnTermination.restore_default()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_script_stays(tmp_path: Path) -> None:
    own = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    with Folder(tmp_path).unfinished():
        assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_process_that_was_forked_during_a_save_removes_nothing(
    tmp_path: Path, raised: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Folder(tmp_path).unfinished() as made:
        monkeypatch.setattr(termination.os, "getpid", lambda: 1)
        terminate()
        assert os.path.exists(made) and raised == [(signal.SIGTERM, signal.SIG_DFL)]
