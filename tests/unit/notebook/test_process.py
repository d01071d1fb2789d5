"""A process whose output appears here, and that ends with the call."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from autodist.notebook.process import _Process, run_module

pytestmark = pytest.mark.processes

START = """
import os, sys, time
ordered, outcome = map(int, os.environ["AUTODIST_LAUNCHED"].split(","))
order = os.read(ordered, 1000)
"""


@pytest.fixture(autouse=True)
def hears_interrupts() -> Iterator[None]:
    """Makes this process receive Ctrl-C: a shell's background jobs ignore it, and these tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `launched_here`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "launched_here.py"


class Shows(io.StringIO):
    """Interrupts the writer of a text once it is complete."""

    def flush(self) -> None:
        if self.getvalue().endswith("ready"):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_is_printed_is_shown_and_what_is_left_comes_back_without_a_disk(
    module: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module.write_text(START + 'print("é", end="")\nsys.stderr.write("x")\nos.write(outcome, order * 2)\nsys.exit(3)\n')
    monkeypatch.setattr(tempfile, "tempdir", str(module.parent / "no folder"))
    ended = run_module("launched_here", b"ab", 1.0)
    assert (ended.status, ended.outcome, ended.interrupt) == (3, b"abab", None)
    assert tuple(capsys.readouterr()) == ("é", "x")


def test_tensorflows_routine_lines_are_not_shown_and_a_line_without_an_end_is_shown_at_once(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routine = "W0000 00:00:1795704298.296997   11244 grpc_worker_service.cc:536] RecvTensor cancelled for 3"
    module.write_text(
        f"import sys, time\nsys.stderr.write('first\\n{routine}\\nlast\\n1/3')\nsys.stderr.flush()\ntime.sleep(60)"
    )

    class Ends(io.StringIO):
        """Interrupts the process once the line without an end is shown."""

        def flush(self) -> None:
            if self.getvalue().endswith("1/3"):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys, "stderr", shown := Ends())
    ended = run_module("launched_here", b"", 1.0)
    assert ended.interrupt is not None and shown.getvalue().startswith("first\nlast\n1/3")
    assert "KeyboardInterrupt" in shown.getvalue() and "RecvTensor" not in shown.getvalue()


def test_interrupt_is_passed_on_and_the_process_ends_as_it_likes(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = """
    try:
        print("ready", end="", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print(", saved")
        os.write(outcome, b"saved")
    """
    module.write_text(START + textwrap.dedent(waits))
    monkeypatch.setattr(sys, "stdout", shown := Shows())
    ended = run_module("launched_here", b"", 1.0)
    assert (ended.status, ended.outcome) == (0, b"saved")
    assert isinstance(ended.interrupt, KeyboardInterrupt)
    assert shown.getvalue() == "ready, saved\n"


def test_interrupt_waits_until_the_guard_has_reported_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The output of the process may come before the report of its guard."""
    reports, reported = os.pipe()
    waits = "try: print('ready', end='', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print(', saved')"
    guard = subprocess.Popen(
        [sys.executable, "-c", f"import time\n{waits}"], stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )

    class Report(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            os.write(reported, f"{guard.pid}\n".encode())

    class ShowsAll(Shows):
        def flush(self) -> None:
            super().flush()
            if self.getvalue().endswith("saved\n"):
                os.close(reported)  # as the guard does at its end

    log = logging.getLogger("autodist")
    monkeypatch.setattr(log, "handlers", [Report()])
    caplog.set_level(logging.INFO, log.name)
    monkeypatch.setattr(sys, "stdout", shown := ShowsAll())
    process = _Process(guard, reports)
    assert isinstance(process.show_all(), KeyboardInterrupt)
    assert guard.wait(30) == 0
    process.end()
    assert shown.getvalue() == "ready, saved\n"


def test_second_interrupt_ends_what_does_not_end(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = """
    import subprocess
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open("pids", "w").write(f"{os.getpid()} {child.pid}")
    while True:
        try:
            print("ready", end="", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("still ", end="")
    """
    module.write_text(START + textwrap.dedent(goes_on))
    monkeypatch.setattr(sys, "stdout", shown := Shows())
    with pytest.raises(KeyboardInterrupt):
        run_module("launched_here", b"", 0.5)
    assert shown.getvalue() == "readystill ready"
    for pid in Path("pids").read_text().split():
        assert not Path("/proc", pid).exists()
