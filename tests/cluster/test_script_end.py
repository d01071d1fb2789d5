"""The end of a script, as an exit handler sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

START = """
import atexit, sys
atexit.register(lambda: print("first registered"))
from autodist.cluster.script_end import watch_script_end
end = watch_script_end()
assert watch_script_end() is end
atexit.register(lambda: print("bad" if end.is_bad else "good"))
"""

CATCHES = """
kept = []
def caught(status, keeps=False):
    try:
        sys.exit(status)
    except SystemExit as exit:
        assert (type(exit), exit.code, str(exit)) == (SystemExit, status, str(status))
        import copy, pickle
        assert pickle.loads(pickle.dumps(exit)).code == copy.copy(exit).code == status
        kept.append(exit) if keeps else None
"""


@pytest.mark.parametrize(
    ("last_line", "seen", "status"),
    [
        ("pass", "good", 0),
        ("sys.exit()", "good", 0),
        ("sys.exit(0)", "good", 0),
        ("raise SystemExit", "good", 0),
        ("sys.exit(3)", "bad", 3),
        ("sys.exit('no data')", "bad", 1),
        ("exit()", "good", 0),
        ("exit(3)", "bad", 3),
        ("quit(code='no data')", "bad", 1),
        ("try: exit(3)\nexcept SystemExit: pass", "good", 0),
        (CATCHES + "caught(3)", "good", 0),
        (CATCHES + "caught(3); sys.exit(4)", "bad", 4),
        (CATCHES + "caught(3, keeps=True); sys.exit()", "good", 0),
        ("try: sys.exit(3)\nexcept SystemExit: raise", "bad", 3),
        ("try: sys.exit(3)\nfinally: sys.exit(0)", "good", 0),
        ("import threading; t = threading.Thread(target=sys.exit, args=[3]); t.start(); t.join()", "good", 0),
        ("atexit.register(sys.exit, 3)", "good", 0),
        ("1 / 0", "bad", 1),
        ("raise KeyboardInterrupt", "bad", -2),
        ("import argparse; argparse.ArgumentParser().error('x')", "bad", 2),
    ],
)
def test_end_is_seen_and_left_as_it_is(last_line: str, seen: str, status: int) -> None:
    command = [sys.executable, "-c", START + last_line]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert (done.stdout.split("\n"), done.returncode) == ([seen, "first registered", ""], status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_by_a_signal_after_the_handlers_and_with_all_its_output(number: signal.Signals) -> None:
    script = f"import signal\natexit.register(lambda: print('kept'))\nend.end_by(signal.{number.name})\n"
    command = [sys.executable, "-c", START + script + "sys.exit(3)"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert (done.stdout.split("\n"), done.returncode) == (["kept", "bad", "first registered", ""], -number)


def test_a_process_ends_by_a_signal_though_its_output_goes_nowhere() -> None:
    script = "import signal\nprint('lost')\nend.end_by(signal.SIGTERM)\n"
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", START + script]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=20, env=buffered
        )
    assert done.returncode == -signal.SIGTERM, done.stderr


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("end.fail()", 1),
        ("end.fail(); end.fail(); sys.exit(3)", 1),
        ("atexit.register(end.fail); sys.exit(3)", 3),
        ("atexit.register(end.fail); sys.exit('no data')", 1),
        ("atexit.register(end.fail); 1 / 0", 1),
        ("end.fail(); end.end_by(signal.SIGTERM)", -signal.SIGTERM),
        ("end.end_by(signal.SIGTERM); end.fail()", -signal.SIGTERM),
    ],
)
def test_a_failure_that_only_exit_handlers_see_shows_in_the_status_after_all_of_them(ends: str, status: int) -> None:
    script = "import signal\natexit.register(lambda: print('kept'))\n"
    done = subprocess.run(
        [sys.executable, "-c", START + script + ends], check=False, capture_output=True, text=True, timeout=20
    )
    assert ("first registered" in done.stdout, "kept" in done.stdout, done.returncode) == (True, True, status)


def test_an_interrupt_that_the_script_catches_is_noted() -> None:
    script = """
import signal
assert end.interrupted_at is None
signal.signal(signal.SIGINT, signal.default_int_handler) if "{deaf}" else None
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print(end.interrupted_at is not None)
"""
    prepare = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    for deaf, noted in (("", "True"), ("yes", "False")):
        command = [sys.executable, "-c", prepare + START + script.format(deaf=deaf)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
        assert (done.stdout.split("\n"), done.returncode) == ([noted, "good", "first registered", ""], 0)


@pytest.mark.parametrize(
    "comes",
    [
        "atexit.register(signal.raise_signal, signal.SIGINT)",
        """
def interrupt():
    threading.main_thread().join()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
""",
        "sys.setprofile(lambda frame, *_: frame.f_code.co_name == '_shutdown' and signal.raise_signal(signal.SIGINT))",
    ],
    ids=["in an exit handler", "while threads end", "first of all"],
)
def test_an_interrupt_after_the_script_ends_the_process_though_python_ignores_its_exception(comes: str) -> None:
    script = "import os, signal, threading\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", script + START + comes]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert (done.stdout.split("\n"), done.returncode) == (["good", "first registered", ""], -signal.SIGINT)
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_finalizer_whose_exceptions_python_ignores_ends_the_script(number: signal.Signals) -> None:
    script = f"""
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
{START}
end.run_handlers_on_termination()
class Last:
    def __del__(self):
        os.kill(os.getpid(), {number})
        time.sleep(0.01)
        print("not reached")
try:
    Last()
    time.sleep(20)
finally:
    print("finally")
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=20)
    assert (done.stdout.split("\n"), done.returncode) == (["finally", "bad", "first registered", ""], -number)
    assert "ignored" not in done.stderr


TERMINATED = """
import os, signal
{before}
end.run_handlers_on_termination()
try:
    if os.fork() == 0:
        signal.raise_signal(signal.SIGTERM)
        print("a child goes on")
    print("the child", os.waitstatus_to_exitcode(os.wait()[1]))
    signal.raise_signal(signal.SIGTERM)
finally:
    print("finally")
"""


def ended_by_sigterm(before: str) -> tuple[list[str], int]:
    command = [sys.executable, "-u", "-c", START + TERMINATED.format(before=before)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    return done.stdout.splitlines(), done.returncode


@pytest.mark.busy
def test_sigterm_runs_exit_handlers_where_the_script_ends_by_it_and_in_no_process_that_it_forks() -> None:
    said = ["the child -15", "finally", "bad", "first registered"]
    assert ended_by_sigterm("") == (said, -signal.SIGTERM)


def test_a_script_keeps_its_own_handler_of_sigterm() -> None:
    own = "signal.signal(signal.SIGTERM, lambda *about: print('own') or os._exit(5))"
    assert ended_by_sigterm(own) == (["own", "the child 5", "own"], 5)


def test_a_signal_that_the_script_ignores_ends_it_all_the_same() -> None:
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nend.end_by(signal.SIGTERM)\n"
    done = subprocess.run([sys.executable, "-c", START + script], check=False, capture_output=True, timeout=20)
    assert done.returncode == -signal.SIGTERM


def test_what_ends_a_thread_is_noted_and_printed() -> None:
    script = """
import threading
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(), thread.join()
print(end.uncaught)
"""
    done = subprocess.run(
        [sys.executable, "-c", START + script], check=False, capture_output=True, text=True, timeout=20
    )
    assert done.stdout.startswith("[ZeroDivisionError(") and "ZeroDivisionError" in done.stderr


LATE = """
import ctypes, json, sys
import autodist.cluster.script_end as module
module.watch_script_end()
for kept in (module, json):  # like references in C code: Python sets their globals to None, and json's are the last
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
class Late:
    def __del__(self, error=ValueError):
        raise error("of the script's own")
"""


@pytest.mark.parametrize(
    ("lines", "reported"),
    [
        ("json.kept = Late()\nsys.exit(3)", ["ValueError: of the script's own"]),
        ("try:\n    sys.exit(4)\nexcept SystemExit as exit:\n    json.kept = exit\nsys.exit(3)", []),
    ],
)
def test_finalizers_that_run_when_globals_are_gone_add_no_error(lines: str, reported: list[str]) -> None:
    command = [sys.executable, "-c", LATE + lines]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert (done.stderr.splitlines()[-1:], done.returncode) == (reported, 3)
    assert "NoneType" not in done.stderr
