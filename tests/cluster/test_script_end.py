"""How a script ends, as an exit handler sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

START = """
import atexit, sys
from autodist.cluster.script_end import watch_script_end
end = watch_script_end()
assert watch_script_end() is end
atexit.register(lambda: print("bad" if end.is_bad else "good"))
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
        ("1 / 0", "bad", 1),
        ("raise KeyboardInterrupt", "bad", -2),
        ("import argparse; argparse.ArgumentParser().error('x')", "bad", 2),
    ],
)
def test_end_is_seen_and_left_as_it_is(last_line: str, seen: str, status: int) -> None:
    command = [sys.executable, "-c", START + last_line]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert (done.stdout.strip(), done.returncode) == (seen, status)
