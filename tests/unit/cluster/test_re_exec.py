"""A process that re-executes its script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import atexit, os, sys
atexit.register(lambda: print("left", flush=True))  # before the import: it has to run all the same
import autodist
from autodist.cluster.re_exec import re_exec_at_the_end, has_lost_input

start = int(os.environ.get("START", "0"))
print(start, os.getpid(), os.getcwd(), sys.argv[1:], os.environ["KEPT"], sys.stdin.readline().strip(), has_lost_input())
if start < 2:
    os.environ["KEPT"] = "changed"
    os.chdir("/")
    re_exec_at_the_end({"START": str(start + 1)})
    raise ValueError("ends it")
sys.exit(3)
"""


def test_the_script_runs_again_with_all_that_it_had_after_its_exit_handlers(tmp_path: Path) -> None:
    script, reported = tmp_path / "script.py", tmp_path / "told"
    script.write_text(SCRIPT)
    reported.write_text("first\nsecond\n")
    with open(reported) as stdin:
        command = [sys.executable, "script.py", "an argument"]
        process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | {"KEPT": "first", "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        out, err = process.communicate(timeout=120)
    line = f"{process.pid} {tmp_path} ['an argument'] first first False"
    assert out.splitlines() == [f"0 {line}", "left", f"1 {line}", "left", f"2 {line}", "left"], err
    assert process.returncode == 3
    assert err.count("ValueError: ends it") == 2


TOLD_TO_END = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), int(sys.argv[1])))  # runs after the handlers of the import
import autodist
from autodist.cluster.re_exec import re_exec_at_the_end
from autodist.cluster.script_end import watch_script_end

signal.signal(signal.SIGINT, signal.default_int_handler)
watch_script_end().run_handlers_on_termination()
print("start", flush=True)
re_exec_at_the_end({})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_in_an_exit_handler_ends_the_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(TOLD_TO_END)
    command = [sys.executable, "script.py", str(int(number))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (-number, "start\n"), done.stderr
