"""The contents of standard error while TensorFlow's own lines are removed from the C library's stream."""

from __future__ import annotations

import signal

import pytest

from tests.unit.logs import child_scripts

ROUTINE = (
    "W0000 00:00:1795321870.931277   23805 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED: "
    "Cleanup 55963058904290403 [type.googleapis.com/tensorflow.DerivedStatus='']"
)
FATAL = "F0000 00:00:1795321859.568474   23362 server.cc:3] Check failed: x"
BEGIN = """
import ctypes, os, subprocess, sys
from autodist.logs.quiet import quiet_tensorflow
from autodist.logs.quiet_stream import quiet_stream
C = ctypes.CDLL(None)
def say(text):
    C.fputs(text.encode() + b"\\n", ctypes.c_void_p.in_dll(C, "stderr"))
"""


def stderr_of(script: str, level: str = "INFO") -> tuple[str, int]:
    """Runs a script that writes to the stream by `say`; returns its standard error and its exit status."""
    return child_scripts.stderr_of(BEGIN + script, level)


def test_routine_lines_are_removed_within_the_context_alone() -> None:
    script = f"""
with quiet_stream():
    say("one")
    say({ROUTINE!r})
    say("two")
say({ROUTINE!r})
"""
    assert stderr_of(script) == (f"one\ntwo\n{ROUTINE}\n", 0)


def test_the_descriptor_stays_as_it_is() -> None:
    script = """
before = os.fstat(2).st_ino
with quiet_stream():
    assert os.fstat(2).st_ino == before
    assert sys.stderr.fileno() == 2
    subprocess.run([sys.executable, "-c", f"import os; assert os.fstat(2).st_ino == {before}"], check=True)
"""
    assert stderr_of(script) == ("", 0)


@pytest.mark.parametrize("within", [True, False])
def test_it_may_begin_within_a_filter_of_the_descriptor(within: bool) -> None:
    script = f"""
from contextlib import ExitStack, nullcontext
with ExitStack() as run:
    with quiet_tensorflow() if {within} else nullcontext():
        run.enter_context(quiet_stream())
        say({ROUTINE!r})
    with quiet_tensorflow():
        say({ROUTINE!r})
    say("later")
    say({ROUTINE!r})
"""
    assert stderr_of(script) == ("later\n", 0)


def test_the_last_lines_before_an_abort_are_seen() -> None:
    shown, status = stderr_of(f"with quiet_stream():\n    say({FATAL!r}); os.abort()\n")
    assert (shown, status) == (f"{FATAL}\n", -signal.SIGABRT)


def test_at_debug_level_all_lines_are_seen() -> None:
    assert stderr_of(f"with quiet_stream():\n    say({ROUTINE!r})\n", "DEBUG") == (f"{ROUTINE}\n", 0)


def test_without_standard_error_the_context_does_nothing() -> None:
    script = "os.close(2)\nwith quiet_stream():\n    sys.exit(3)\n"
    assert stderr_of(script) == ("", 3)
