"""The contents of standard error while TensorFlow's own lines are suppressed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.logs import child_scripts

STARTS = (
    "I0000 00:00:1795321859.568474   23362 cudart_stub.cc:31] Could not find cuda drivers on your machine, "
    "GPU will not be used."
)
FATAL = "F0000 00:00:1795321859.568474   23362 server.cc:3] Check failed: x"


def _stderr(script: str, level: str = "INFO") -> tuple[str, int]:
    """Runs a script, which may write past Python with `say`, and returns its standard error and its exit status."""
    begin = (
        "import os, sys\nfrom autodist.logs.quiet import quiet_tensorflow\nsay = lambda t: os.write(2, t.encode())\n"
    )
    return child_scripts.stderr_of(begin + script, level)


def test_known_lines_are_left_out_and_all_else_stays_in_order() -> None:
    script = f"""
with quiet_tensorflow():
    say("one\\n{STARTS}\\ntwo")
    say(" more\\n")
    print("three", file=sys.stderr)
    say("I0000 00:00:1 1 port.cc:1] new\\n")
say("{STARTS}\\n")
"""
    assert _stderr(script) == (f"one\ntwo more\nthree\nI0000 00:00:1 1 port.cc:1] new\n{STARTS}\n", 0)


def test_a_line_that_comes_in_parts_is_known_as_well() -> None:
    half = len(STARTS) // 2
    script = f"with quiet_tensorflow():\n    say({STARTS[:half]!r}); say({STARTS[half:]!r}); say('\\nend')\n"
    assert _stderr(script) == ("end", 0)


def test_what_is_said_before_an_abort_is_seen() -> None:
    script = f"with quiet_tensorflow():\n    say({FATAL!r} + chr(10)); os.abort()\n"
    assert _stderr(script) == (FATAL + "\n", -signal.SIGABRT)


def test_who_debugs_sees_all() -> None:
    assert _stderr(f"with quiet_tensorflow():\n    say({STARTS!r})\n", "DEBUG") == (STARTS, 0)


@pytest.mark.parametrize("inner", ["with quiet_tensorflow(): pass", "raise KeyError"])
def test_standard_error_is_back_after_it(inner: str) -> None:
    script = f"""
before = os.fstat(2)
try:
    with quiet_tensorflow():
        assert os.fstat(2) != before
        {inner}
except KeyError:
    pass
assert os.path.samestat(os.fstat(2), before)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    say("no child is left")
"""
    assert _stderr(script) == ("no child is left", 0)


def test_the_filter_outlives_the_signals_that_end_others() -> None:
    script = f"""
import signal, threading
with quiet_tensorflow():
    (child,) = open(f"/proc/self/task/{{threading.get_native_id()}}/children").read().split()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(int(child), number)
    say("{STARTS}\\nseen")
"""
    assert _stderr(script) == ("seen", 0)


# The n-th process is interrupted at the n-th line of the file that it comes to. What it has told is looked for as soon
# as it has ended.
INTERRUPTED = """
import itertools, signal, sys
from autodist.logs import quiet

def interrupt_at(count):
    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename == quiet.__file__:
            count -= event == "line"
            if count == 0:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signal.SIGINT)
        return trace
    sys.settrace(trace)

signal.signal(signal.SIGINT, signal.default_int_handler)
for count in itertools.count(1):
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(writer, 2)
        interrupt_at(count)
        with quiet_tensorflow():
            pass
        sys.exit()
    status = os.waitpid(process, 0)[1]
    os.set_blocking(reader, False)
    told = b""
    try:
        while more := os.read(reader, 1 << 16):
            told += more
    except BlockingIOError:
        pass
    os.close(reader), os.close(writer)
    if status == 0:
        break
    assert status == signal.SIGINT, (count, status)
    assert told.endswith(b"KeyboardInterrupt\\n") and told.count(b"Traceback") == 1, (count, told)
os.write(2, str(count).encode())
"""


def test_ctrl_c_is_told_by_the_time_the_process_ends_wherever_it_came() -> None:
    told, status = _stderr(INTERRUPTED)
    assert status == 0, told
    assert int(told) > 40, "it was interrupted at every line"


def test_a_process_without_standard_error_goes_on() -> None:
    script = "os.close(2)\nwith quiet_tensorflow():\n    sys.exit(3)\n"
    assert _stderr(script) == ("", 3)


@pytest.mark.processes
@pytest.mark.parametrize("written", ["half a line", "a line\n"])
def test_standard_error_on_a_full_disk_ends_nothing(written: str) -> None:
    script = f"""
import os, sys
from autodist.logs.quiet import quiet_tensorflow
with quiet_tensorflow():
    for _ in range(3):
        os.write(2, b"more\\n")
    try:
        sys.stderr.write({written!r})
    except OSError:
        pass
os.write(1, b"went on")
"""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert done.stdout == b"went on"


def test_a_file_that_has_the_number_of_a_closed_standard_error_is_left_alone(tmp_path: Path) -> None:
    script = f"""
os.dup2(os.open({str(tmp_path / "own")!r}, os.O_WRONLY | os.O_CREAT), 2)
before = os.stat(2)
with quiet_tensorflow():
    assert os.path.samestat(os.stat(2), before)
    say("own")
"""
    begin = "import os\nfrom autodist.logs.quiet import quiet_tensorflow\nsay = lambda t: os.write(2, t.encode())\n"
    closed = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", begin + script]
    assert subprocess.run(closed, timeout=60, check=False).returncode == 0
    assert (tmp_path / "own").read_text() == "own"


def test_a_brief_call_is_filtered_too_and_the_output_of_its_child_processes_is_kept() -> None:
    script = f"""
import subprocess, threading
from autodist.logs.quiet import quiet_briefly
with quiet_briefly():
    say("one\\n{STARTS}\\n")
    print("two", file=sys.stderr)
    child = subprocess.Popen(["sh", "-c", "read line; echo three >&2"], stdin=subprocess.PIPE)
say("after\\n")
child.communicate(b"go\\n")
[thread.join() for thread in threading.enumerate() if thread.name == "autodist-quiet"]
"""
    assert _stderr(script) == ("one\ntwo\nafter\nthree\n", 0)


def test_a_brief_call_raises_its_error_and_restores_standard_error() -> None:
    script = f"""
from autodist.logs.quiet import quiet_briefly
try:
    with quiet_briefly():
        raise ValueError
except ValueError:
    say("{STARTS}\\n")
"""
    assert _stderr(script) == (STARTS + "\n", 0)
