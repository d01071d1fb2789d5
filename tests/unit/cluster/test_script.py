from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autodist.cluster.script import Script, script_position
from autodist.errors import ClusterError


@pytest.mark.parametrize(
    ("command", "position"),
    [
        (["python"], None),
        (["python", "-i"], None),
        (["python", "-"], None),
        (["python", "train.py"], 1),
        (["python", "-u", "-W", "error", "train.py", "-c"], 4),
        (["python", "-Werror", "-Xdev", "train.py"], 3),
        (["python", "-BX", "dev", "train.py"], 3),
        (["python", "--check-hash-based-pycs", "always", "train.py"], 3),
        (["python", "-m", "package.train", "x"], 1),
        (["python", "-Bum", "package.train"], 1),
        (["python", "-c", "print()"], 1),
        (["python", "-cprint()"], 1),
    ],
)
def test_script_position(command: list[str], position: int | None) -> None:
    assert script_position(command) == position


def test_script_of_this_process_is_named_by_its_whole_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train.py", "--steps", "3"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    monkeypatch.setenv("AUTODIST_DUMP", "/d")
    script = Script.of_this_process()
    assert script.arguments == ("-u", os.path.join(tmp_path, "train.py"), "--steps", "3")
    assert (script.file, script.directory) == (os.path.join(tmp_path, "train.py"), str(tmp_path))
    assert ("AUTODIST_DUMP", "/d") in script.environment
    assert all(name.startswith("AUTODIST_") for name, _ in script.environment)


def test_module_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "package.train", "x"])
    script = Script.of_this_process()
    assert script.arguments == ("-m", "package.train", "x")
    assert script.file is None


def test_interactive_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python"])
    with pytest.raises(ClusterError, match="runs no script"):
        Script.of_this_process()
