from __future__ import annotations

import pytest

from autodist.resources._node import VENV, venv_fault


@pytest.mark.parametrize("path", ["~/venv", "/opt/my venv", "/opt/python3.11", "~", "/R&D/bin", "/home/source x/venv"])
def test_paths_of_environments_have_no_fault(path: str) -> None:
    assert venv_fault(path) is None


@pytest.mark.parametrize(
    ("line", "here"),
    [
        ("source ~/venv/bin/activate", ": ~/venv"),
        (". /opt/venv/bin/activate", ": /opt/venv"),
        ("module load python && source ~/venv/bin/activate", ": ~/venv"),
        ("/opt/venv/bin/activate; export A=1", ": /opt/venv"),
        ("conda activate lab", ""),
        ("$HOME/venv", ""),
        ("echo | cat", ""),
    ],
)
def test_shell_lines_are_told_with_the_environment_that_they_name(line: str, here: str) -> None:
    assert venv_fault(line) == f'"{line}" is a shell command, and no shell runs it; allowed: {VENV}{here}'


@pytest.mark.parametrize(
    ("path", "venv"), [("~/my venv/bin/activate.fish", "~/my venv"), ("/opt/venv/bin/python3.11", "/opt/venv")]
)
def test_files_in_an_environment_are_told_with_it(path: str, venv: str) -> None:
    assert str(venv_fault(path)).endswith(
        f"is a file in a virtual environment; allowed: the environment itself, {venv}"
    )
