from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.cluster.ssh_machine import quote
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
    made = SSHSettings.from_group("10.0.0.2", group, 7.5)
    assert made.connect_timeout == 7.5
    assert made.port is None, "a port that the YAML leaves out may come from ~/.ssh/config"
    assert SSHSettings(**json.loads(json.dumps(made.to_json()))) == made
    assert made.command("m", "x")[-6:] == ["env", "~/venv/bin/python", "-P", "-m", "m", "x"]


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.from_regex(r"TEST_[A-Za-z0-9_]*", fullmatch=True), ARGUMENTS), st.binary())
def test_environment_goes_before_all_else_on_standard_input_and_not_among_arguments(
    environment: dict[str, str], rest: bytes
) -> None:
    made = SSHSettings("host", environment=environment)
    command = made.command("module")
    assert not any(value in part for value in environment.values() for part in command if len(value) > 9)
    show = "import os, sys; sys.stdout.buffer.write(repr((dict(os.environ), sys.stdin.buffer.read())).encode())"
    shown = [*command[: command.index("-P")], "-S", "-c", show]
    done = subprocess.run(["sh", "-c", quote(shown)], input=made.preamble + rest, capture_output=True, check=True)
    given_environment, given_input = ast.literal_eval(done.stdout.decode())
    assert {name: given_environment[name] for name in environment} == environment
    assert given_input == rest


def test_environment_is_in_no_text_of_the_settings() -> None:
    made = SSHSettings.from_group("10.0.0.2", SSHGroup(shared_envs={"A": "secret"}), 15.0)
    assert "secret" not in repr(made)
    assert "secret" not in repr(SSHGroup(shared_envs={"A": "secret"}))


def test_port_of_the_yaml_wins_and_interpreter_is_the_chiefs() -> None:
    made = SSHSettings.from_group("10.0.0.2", SSHGroup(port=2222), 15.0)
    assert made.port == 2222
    assert made.interpreter == sys.executable
