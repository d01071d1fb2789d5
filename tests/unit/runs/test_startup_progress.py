"""The terminal output while a run starts."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from autodist.logs.terminal import LEVEL_VARIABLE
from autodist.runs.startup_progress import StartupProgress

BEGIN = """
import logging, os, sys
from autodist.logs.terminal import log_to_the_terminal
from autodist.runs.startup_progress import StartupProgress
from autodist.cluster.output import Output
log_to_the_terminal(True)
start = StartupProgress(is_chief=True)
"""


def _on_a_terminal(script: str, level: str = "INFO") -> tuple[str, str]:
    """Returns a script's standard error, which is a terminal, and its standard output, a pipe."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                shown.append(os.read(ours, 1 << 16))
            except OSError:  # nobody has the other end any more
                return

    environment = {**os.environ, LEVEL_VARIABLE: level, "TERM": "xterm", "COLUMNS": "80"}
    reader = threading.Thread(target=read)
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + script], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
    ) as process:
        os.close(theirs)
        reader.start()
        printed, _ = process.communicate(timeout=60)
    reader.join()
    os.close(ours)
    assert process.returncode == 0, b"".join(shown)
    return b"".join(shown).decode(), printed


def test_a_terminal_shows_what_is_being_done_and_lines_above_it() -> None:
    shown, printed = _on_a_terminal("""
with start.showing("waiting for two"):
    start.log_done("reached %s", "there")
    output = Output()
    output.line("stderr", "two", "a worker's line")
    output.line("stdout", "two", "another")
    assert output.drain(10)
    print("the script's")
    with start.showing("asking"):
        pass
start.finish()
with start.showing("a later step"):
    pass
""")
    assert "autodist: waiting for two …" in shown
    assert re.search(r"autodist: +\d+\.\d s: reached there\r\n", shown)
    assert "[two] a worker's line\r\n" in shown
    assert "asking …" in shown
    assert "a later step" not in shown
    assert shown.index("first step finished") > shown.index("asking")
    assert printed == "[two] another\nthe script's\n"  # a pipe gets the same output as without a terminal


def test_a_forked_process_writes_past_it() -> None:
    shown, _ = _on_a_terminal("""
with start.showing("forking"):
    child = os.fork()
    if child == 0:
        print("of the child", file=sys.stderr)
        sys.stderr.flush()
        os._exit(type(sys.stderr).__name__ == "FileProxy")
    assert os.waitpid(child, 0)[1] == 0
""")
    assert "of the child" in shown


@pytest.mark.parametrize("script", ["", "log = logging.getLogger('autodist'); log.setLevel('WARNING')\n"])
def test_nothing_moves_where_nothing_is_to_be_told(script: str) -> None:
    level = "WARNING" if not script else "INFO"
    shown, _ = _on_a_terminal(f"{script}with start.showing('waiting'):\n    pass\n", level)
    assert shown == ""


def test_elsewhere_than_on_a_terminal_there_are_lines_alone(caplog: pytest.LogCaptureFixture) -> None:
    start = StartupProgress(is_chief=True)
    with caplog.at_level(logging.INFO, "autodist"):
        with start.showing("waiting"):
            start.log_done("reached")
        start.finish()
        start.finish()
        start.log_done("another")
    assert [m.split(" s: ")[1] for m in caplog.messages] == ["reached", "first step finished"]


def test_other_workers_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    start = StartupProgress(is_chief=False)
    with caplog.at_level(logging.DEBUG, "autodist"), start.showing("waiting"):
        start.log_done("reached")
    start.finish()
    assert caplog.messages == []


def test_the_terminals_width_is_known_and_a_file_has_none() -> None:
    shown, printed = _on_a_terminal(
        "print(start.columns); logging.getLogger('autodist').handlers.clear(); print(start.columns)"
    )
    assert printed.split() == ["80", "None"], shown
    assert StartupProgress(is_chief=False).columns is None
