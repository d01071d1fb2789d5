"""scripts/setup: the Python that it chooses, the conditions for an installation, and its errors."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkout of a package, as far as scripts/setup looks at one, and an empty folder of commands."""
    for folder in ("scripts", "proto", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")
    for name in ("pyproject.toml", "setup.py", "proto/one.proto", "proto/__init__.py"):
        (tmp_path / name).write_text(name)
    return tmp_path


def command(tree: pathlib.Path, name: str, text: str) -> pathlib.Path:
    """Puts a command before all others."""
    path = tree / "bin" / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def fake_environment(tree: pathlib.Path) -> None:
    """A virtual environment whose Python has all required features, and that records each installation."""
    (tree / "venv" / "bin").mkdir(parents=True)
    made = command(tree, "any", 'case "$*" in *"pip install"*) echo "$@" >>installations ;; esac')
    made.rename(tree / "venv" / "bin" / "python")


def run(tree: pathlib.Path, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    text = f"set -euo pipefail\n. scripts/setup\n{line}"
    paths = f"{tree / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", "-c", text], cwd=tree, env={"PATH": paths, **environment}, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


def installations(tree: pathlib.Path) -> list[str]:
    notes = tree / "installations"
    return notes.read_text().splitlines() if notes.exists() else []


def test_the_python_that_the_user_names_is_taken(tree: pathlib.Path) -> None:
    done = run(tree, "find_python", PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, f"{sys.executable}\n")


@pytest.mark.parametrize("line", ["find_python", "python=$(find_python); echo went on", "make_environment venv test"])
def test_a_python_that_cannot_work_is_refused_with_the_mend(tree: pathlib.Path, line: str) -> None:
    done = run(tree, line, PYTHON="/bin/false")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: PYTHON=/bin/false is not a Python 3.11, 3.12 or 3.13; ")


def test_a_command_that_does_not_run_is_passed_over(tree: pathlib.Path) -> None:
    command(tree, "python3.11", "exit 127")
    command(tree, "python3.12", "exit 0")
    assert run(tree, "find_python").stdout == "python3.12\n"


def test_no_python_at_all_is_an_error_that_names_the_packages(tree: pathlib.Path) -> None:
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        command(tree, name, "exit 1")
    done = run(tree, "find_python")
    assert done.returncode == 1
    assert "apt-get install python3 python3-venv" in done.stderr


def test_an_environment_is_installed_once(tree: pathlib.Path) -> None:
    fake_environment(tree)
    for _ in range(2):
        assert run(tree, "make_environment venv examples lint test").returncode == 0
    assert [line.rpartition(" ")[2] for line in installations(tree)] == [".[examples,lint,test]"]


def test_a_part_of_what_is_installed_needs_no_installation_and_more_than_it_does(tree: pathlib.Path) -> None:
    fake_environment(tree)
    for line in ("make_environment venv examples test", "make_environment venv examples", "make_environment venv lint"):
        assert run(tree, line).returncode == 0
    assert [line.rpartition(" ")[2] for line in installations(tree)] == [".[examples,test]", ".[lint]"]


@pytest.mark.parametrize("changed", ["pyproject.toml", "setup.py", "proto/one.proto", "proto/messages.binpb", "pins"])
def test_it_is_installed_again_after_a_change(tree: pathlib.Path, changed: str) -> None:
    fake_environment(tree)
    (tree / "pins").write_text("x==1")
    for text in ("one", "one", "two"):
        if text == "two":
            (tree / changed).write_text(text)
        assert run(tree, "make_environment venv test", CONSTRAINTS="pins").returncode == 0
    assert len(installations(tree)) == 2
    assert "--constraint pins" in installations(tree)[0]


def test_a_failed_installation_is_tried_again(tree: pathlib.Path) -> None:
    fake_environment(tree)
    (tree / "venv" / "bin" / "python").write_text('#!/bin/bash\n[ "$2" != pip ]\n')
    done = run(tree, "make_environment venv test; echo went on")
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "pip could not install the package into venv" in done.stderr
    assert not (tree / "venv" / "installed-test").exists()


def test_a_command_that_is_there_needs_no_package(tree: pathlib.Path) -> None:
    command(tree, "apt-get", "echo called >&2; exit 1")
    done = run(tree, "need_command bash bash")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_command_is_installed_without_a_password(tree: pathlib.Path) -> None:
    command(tree, "id", "echo 1000")
    command(tree, "sudo", 'shift; exec "$@"')
    command(tree, "apt-get", 'echo "$@" >>installed')
    assert run(tree, "need_command no-such-command one two").returncode == 0
    assert (tree / "installed").read_text().splitlines()[-1].endswith("--no-install-recommends one two")


def test_without_root_the_missing_packages_are_named(tree: pathlib.Path) -> None:
    command(tree, "id", "echo 1000")
    command(tree, "sudo", "exit 1")
    command(tree, "apt-get", "exit 0")
    done = run(tree, "need_command no-such-command openssh-server")
    assert done.returncode == 1
    assert "needs root or sudo without a password" in done.stderr
    assert "apt-get install openssh-server" in done.stderr


def test_scripts_are_bash_that_parses_and_say_what_they_are_for() -> None:
    for name in ("demo", "test", "nightly", "versions"):
        path = ROOT / "scripts" / name
        subprocess.run(["bash", "-n", path], check=True, timeout=20)
        help_text = subprocess.run([path, "--help"], capture_output=True, text=True, check=True, timeout=20).stdout
        assert f"./scripts/{name}" in help_text
        assert "set -euo pipefail" not in help_text
