"""`autodist.launch` where no notebook is: in a script, and at Python's prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LIMIT = 280

SCRIPT = """
import autodist

print("begins")
offset = 2

class Failed(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code = code

def train(ad, x):
    print("trains", ad.num_workers, __name__)
    if x is None:
        raise Failed(7, why="nothing is given")
    return x + offset

print("returned", autodist.launch(train, 3))
try:
    autodist.launch(train, None)
except Failed as failed:
    print("failed", failed.code, failed, str(failed.__cause__).count("raise Failed(7, why"))
"""

TYPED = """
import autodist
offset = 2
def train(ad, x):
    print("trains", ad.num_workers, __name__)
    return x + offset

print("returned", autodist.launch(train, 3))
"""


def test_a_script_launches_a_function_of_its_own_twice_and_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT, check=False
    )
    assert done.stdout.splitlines() == [
        *("begins", "trains 1 __main__", "returned 5"),
        *("trains 1 __main__", "failed 7 7: nothing is given 1"),
    ], done.stderr


def test_what_is_typed_at_a_prompt_can_be_launched(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-i"], input=TYPED, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT, check=False
    )
    assert done.stdout.splitlines() == ["trains 1 __main__", "returned 5"], done.stderr
