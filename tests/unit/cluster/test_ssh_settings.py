from __future__ import annotations

import json
import shlex
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.cluster.ssh_connection import quote
from autodist.cluster.ssh_settings import SSHSettings
from autodist.resources import SSHGroup

ARGUMENTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(st.lists(ARGUMENTS.filter(lambda text: not text.startswith("~/"))))
def test_quoted_arguments_are_read_back_one_by_one(arguments: list[str]) -> None:
    assert shlex.split(quote(arguments)) == arguments


@settings(max_examples=20, deadline=None)
@given(st.lists(ARGUMENTS.filter(lambda text: not text.startswith("~/")), min_size=1))
def test_a_shell_hands_quoted_arguments_on_unchanged(arguments: list[str]) -> None:
    printer = [sys.executable, "-S", "-c", "import sys; sys.stdout.buffer.write(repr(sys.argv[1:]).encode())"]
    done = subprocess.run(["sh", "-c", quote([*printer, *arguments])], capture_output=True, check=True)
    assert done.stdout.decode() == repr(arguments)


def test_home_directory_is_left_to_the_other_machine() -> None:
    assert quote(["~/my venv/bin/python"]) == "~/'my venv/bin/python'"


def test_group_becomes_settings_and_survives_the_way_to_the_relay() -> None:
    group = SSHGroup(username="ann", key_file="/k", python_venv="~/venv", shared_envs={"A": "b c"}, known_hosts="/h")
    made = SSHSettings.of_group("10.0.0.2", group)
    assert made.port is None, "a port that the YAML leaves out may come from ~/.ssh/config"
    assert SSHSettings(**json.loads(json.dumps(made.as_json()))) == made
    assert made.command("m", "x") == ["env", "A=b c", "~/venv/bin/python", "-P", "-m", "m", "x"]


def test_port_of_the_yaml_wins_and_interpreter_is_the_chiefs() -> None:
    made = SSHSettings.of_group("10.0.0.2", SSHGroup(port=2222))
    assert made.port == 2222
    assert made.interpreter == sys.executable
