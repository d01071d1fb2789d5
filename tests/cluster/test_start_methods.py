"""Each way of starting a script, by the tools themselves: the command also runs on a worker, or it is rejected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

LIMIT = 60

SCRIPT = """
import json, sys
import autodist
from autodist.cluster.script import Script, require_script
from autodist.errors import ClusterError
try:
    require_script()
    print("RUN", json.dumps({"started with": Script.of_this_process().arguments, "finds": sys.argv[1:]}))
except ClusterError as error:
    print("REFUSED", str(error))
"""
ONE_LINE = f"exec({SCRIPT!r})"
AT_A_PROMPT = SCRIPT + "\n"

# By way: the command, with "SCRIPT" for the script; the start of the other workers.
REPEATED = {
    "a file": (["train.py", "x"], ["{here}/train.py", "x"]),
    "a module": (["-m", "train", "x"], ["-m", "train", "x"]),
    "-c": (["-c", SCRIPT, "x"], ["-c", SCRIPT, "x"]),
    "-i": (["-i", "train.py", "x"], ["{here}/train.py", "x"]),
    "zipapp": (["train.pyz", "x"], ["{here}/train.pyz", "x"]),
    "a folder": (["app", "x"], ["{here}/app", "x"]),
    "runpy": (["-m", "runpy", "train", "x"], ["-m", "runpy", "train", "x"]),
    "runpy in a script": (["runs.py", "x"], ["{here}/runs.py", "x"]),
    "pdb": (["-m", "pdb", "-c", "continue", "-c", "quit", "train.py", "x"], ["{here}/train.py", "x"]),
    "pdb of a module": (["-m", "pdb", "-c", "continue", "-c", "quit", "-m", "train", "x"], ["-m", "train", "x"]),
    "debugpy": (["-m", "debugpy", "--listen", "127.0.0.1:0", "train.py", "x"], ["{here}/train.py", "x"]),
    "cProfile": (["-m", "cProfile", "-o", "profile", "train.py", "x"], ["{here}/train.py", "x"]),
    "trace": (["-m", "trace", "--count", "-C", "counts", "train.py", "x"], ["{here}/train.py", "x"]),
    "coverage": (["-m", "coverage", "run", "train.py", "x"], ["{here}/train.py", "x"]),
    "IPython": (["-m", "IPython", "train.py", "x"], ["{here}/train.py", "x"]),
}

# By way: the command, its input, and the message.
REFUSED = {
    "-": (["-", "x"], SCRIPT, "runs no script"),
    "typed": (["-i"], AT_A_PROMPT, "runs no script"),
    "typed after a script": (["-i", "empty.py"], ONE_LINE, "is created at a prompt"),
    "/dev/stdin": (["/dev/stdin"], SCRIPT, "only this process can read"),
    "code": (["-m", "code"], ONE_LINE, "code runs here, and no script"),
    "IPython": (["-m", "IPython", "--simple-prompt"], ONE_LINE, "IPython runs here, and no script"),
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    for file in ("train.py", "app/__main__.py"):
        (tmp_path / file).write_text(SCRIPT)
    (tmp_path / "runs.py").write_text("import runpy\nrunpy.run_path('train.py', run_name='__main__')\n")
    (tmp_path / "empty.py").write_text("")
    zipapp.create_archive(tmp_path / "app", tmp_path / "train.pyz")
    return tmp_path


def told_by(command: list[str], here: Path, typed: str = "") -> str:
    """Returns the script's report from a command's output."""
    environment = os.environ | {"IPYTHONDIR": str(here / "ipython"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, *command],
        input=typed,
        capture_output=True,
        text=True,
        cwd=here,
        env=environment,
        timeout=LIMIT,
        check=False,
    )
    reported = [
        line[line.index(word) :] for line in done.stdout.splitlines() for word in ("RUN ", "REFUSED ") if word in line
    ]
    assert len(reported) == 1, f"{done.stdout}\n{done.stderr}"
    return reported[0]


@pytest.mark.parametrize("way", REPEATED)
def test_what_is_found_runs_the_same(way: str, here: Path) -> None:
    command, expected = REPEATED[way]
    reported = told_by(command, here)
    assert reported.startswith("RUN ")
    found = json.loads(reported.removeprefix("RUN "))
    assert found["started with"] == [word.replace("{here}", str(here)) for word in expected]
    assert told_by(found["started with"], here) == reported


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_repeated_is_refused_with_the_fix(way: str, here: Path) -> None:
    command, typed, said = REFUSED[way]
    reported = told_by(command, here, typed)
    assert reported.startswith("REFUSED ")
    assert said in reported
    assert "`autodist.launch(function, workers=2)`" in reported
