"""Exits of real processes: their statuses, and what of the C library's handlers runs."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

ABORTS = "c = ctypes.CDLL(None); c.__cxa_atexit(ctypes.cast(c.abort, ctypes.c_void_p), None, None)"


def _ended(*lines: str) -> tuple[int, bytes]:
    names = "exit_by_signal, exit_with_status, exit_without_destructors"
    code = "\n".join(["import ctypes, signal, sys", f"from autodist.process_exit import {names}", *lines])
    done = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("status", [0, 3])
def test_without_destructors_a_process_keeps_its_status_and_its_output(status: int) -> None:
    assert _ended(ABORTS, f"sys.exit({status})") == (-signal.SIGABRT, b"")
    printed = "c.puts(b'printed by C')"
    assert _ended(ABORTS, "exit_without_destructors()", printed, f"sys.exit({status})") == (status, b"printed by C\n")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("exit_by_signal(signal.SIGTERM)", -signal.SIGTERM),
        ("exit_with_status(5)", 5),
        ("exit_without_destructors()", 0),
    ],
)
def test_another_end_stays(is_first: bool, other: str, expected: int) -> None:
    calls = [other, "exit_without_destructors()"] if is_first else ["exit_without_destructors()", other]
    assert _ended(ABORTS, *calls)[0] == expected


def test_a_signal_comes_before_a_status() -> None:
    assert _ended("exit_with_status(5)", "exit_by_signal(signal.SIGTERM)")[0] == -signal.SIGTERM
