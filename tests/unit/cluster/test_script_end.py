"""Signals that end a script: one whose exception is dropped comes again, once, and a further one prints nothing."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, signal, time
from autodist.cluster.script_end import watch_script_end

watch_script_end()

class Interrupted:
    def __getattr__(self, name):
        signal.raise_signal(signal.SIGINT)

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

scope = dict(globals(), __name__={module!r})
exec('''
def drop():
    {drop}
    time.sleep(1)
''', scope)
interrupts = 0
for call in (scope["drop"], lambda: time.sleep(0.5)):
    try:
        call()
    except KeyboardInterrupt:
        interrupts += 1
print(interrupts)
"""
CLEARS = 'ctypes.pythonapi.PyObject_HasAttrString(ctypes.py_object(Interrupted()), b"shape")'
CATCHES = """
    try:
        Interrupted().shape
    except BaseException:
        pass
"""


LIBRARY, OWN = "tensorflow.python.framework.ops", "__main__"


@pytest.mark.parametrize(
    ("drop", "module", "interrupts"),
    [
        (CLEARS, LIBRARY, 1), (CATCHES, LIBRARY, 1), ("Finalized()", LIBRARY, 1),
        (CLEARS, OWN, 0), (CATCHES, OWN, 0), ("Finalized()", OWN, 1),
    ],
    ids=["in C", "in Python", "in a finalizer", "in C by the script", "by the script", "in a finalizer of the script"],
)  # fmt: skip
def test_an_interrupt_that_is_lost_comes_again_once(drop: str, module: str, interrupts: int) -> None:
    script = SCRIPT.format(module=module, drop=drop)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout.strip(), found.stderr) == (str(interrupts), "")


TERMINATED_TWICE = """
import signal, sys, threading, time
from autodist.cluster.script_end import watch_script_end

watch_script_end().run_handlers_on_termination()

def terminate_again():
    while threading.main_thread().is_alive() and "left" not in globals():
        time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    time.sleep(0.5)

threading.Thread(target=terminate_again).start()
try:
    signal.raise_signal(signal.SIGTERM)
finally:
    left = True
"""


def test_a_second_sigterm_while_python_ends_prints_nothing() -> None:
    command = [sys.executable, "-c", TERMINATED_TWICE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGTERM, "", "")


INTERRUPTED_WHILE_REPORTED = """
import signal, sys
from autodist.cluster.script_end import watch_script_end

watch_script_end()

def report(*about):
    signal.raise_signal(signal.SIGINT)
    print("reported", file=sys.stderr)

def fail():
    raise {raised}

sys.excepthook = report
fail()
"""


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "ValueError('one of the script')"])
@pytest.mark.parametrize("is_module", [False, True], ids=["-c", "-m"])
def test_ctrl_c_while_python_reports_an_exception_ends_the_process_after_the_report(
    tmp_path: pathlib.Path, raised: str, is_module: bool
) -> None:
    script = INTERRUPTED_WHILE_REPORTED.format(raised=raised)
    (tmp_path / "module.py").write_text(script)
    command = [sys.executable, *(["-m", "module"] if is_module else ["-c", script])]
    found = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGINT, "", "reported\n")
