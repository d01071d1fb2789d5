"""The command itself: version, help, wrong options, errors, and its imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autodist.cli.app import app
from autodist.cli.plans import PlannedStrategy, Plans
from autodist.errors import AutoDistError
from autodist.versions import VERSION

RUNNER = CliRunner()


def test_version_is_the_package_s() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"autodist {VERSION}\n")


@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])  # type: ignore[union-attr]
def test_help_of_each_command_has_examples(command: str) -> None:
    result = RUNNER.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.stdout and f"autodist {command}" in result.stdout


@pytest.mark.parametrize(
    "words, told",
    [
        (["plan", "--sorcery", "train.py"], "--sorcery"),
        (["plan"], "SCRIPT"),
        (["plan", "--workers", "0", "train.py"], "--workers"),
        (["plan", "--workers", "two", "train.py"], "--workers"),
        (["plan", "--cluster", "missing.yml", "train.py"], "missing.yml"),
        (["sorcery"], "sorcery"),
        (["diff", "one.json"], "Missing argument 'B'"),
        (["check", "--seconds", "0", "cluster.yml"], "--seconds"),
        (["check", "missing.yml"], "missing.yml"),
        (["verify", "--cluster", "cluster.yml", "train.py"], "--cluster"),
        (["trace", "--sorcery", "."], "--sorcery"),
        (["run"], "SCRIPT"),
    ],
)
def test_a_wrong_option_is_told_on_standard_error_with_status_2(words: list[str], told: str) -> None:
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 2
    assert told in result.stderr and result.stdout == ""


def test_an_error_is_one_line_without_a_traceback_unless_that_is_asked_for(tmp_path: Path) -> None:
    missing = str(tmp_path / "a.json")
    result = RUNNER.invoke(app, ["diff", missing, missing])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"autodist: error: {missing} cannot be read: No such file or directory.\n"
    told = RUNNER.invoke(app, ["diff", "--traceback", missing, missing])
    assert isinstance(told.exception, AutoDistError)


def started(words: list[str], redirected: str) -> subprocess.CompletedProcess[str]:
    """Starts the command in a shell line that ends with `redirected`."""
    line = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "autodist", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "words, redirected, status, told",
    [
        (["--version"], ">/dev/full", 2, "autodist: error: [Errno 28] No space left on device\n"),
        (["--version"], ">&-", 0, ""),
        (["diff", "{plan}", "{plan}"], ">/dev/full", 2, "autodist: error: [Errno 28] No space left on device\n"),
        (["run", "missing.py"], "2>/dev/full", 2, ""),
        (["run", "missing.py"], "2>&-", 2, ""),
    ],
)
def test_outputs_that_take_nothing_are_told_where_somebody_listens(
    tmp_path: Path, words: list[str], redirected: str, status: int, told: str
) -> None:
    plan = tmp_path / "plan.json"
    one = PlannedStrategy(strategy="PS", builder="PS", variables=(), workers=(), links=())
    plan.write_text(Plans(script="train.py", plans=(one,)).model_dump_json())
    done = started([word.format(plan=plan) for word in words], redirected)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)


def test_output_ends_if_its_reader_has_ended(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "autodist", "run", "--help"]
    with open(writing, "wb") as closed:
        done = subprocess.run(line, stdout=closed, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("module", ["app", "verifying"])
def test_neither_the_command_nor_its_help_nor_what_compares_two_runs_imports_tensorflow(module: str) -> None:
    name = f"autodist.cli.{module}"
    code = f"import sys, {name}; sys.exit(sorted({{'tensorflow', 'keras', 'paramiko'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "usage",
    [
        "run [OPTIONS] {SCRIPT} [ARGS]...",
        "check [OPTIONS] {CLUSTER} [SCRIPT]",
        "plan [OPTIONS] {SCRIPT} [ARGS]...",
        "diff [OPTIONS] {A} {B}",
        "verify [OPTIONS] {SCRIPT} [ARGS]...",
        "trace [OPTIONS] {FOLDER}",
    ],
)
def test_usage_names_what_is_needed_and_what_may_be_left_out(usage: str) -> None:
    told = RUNNER.invoke(app, [usage.partition(" ")[0], "--help"], prog_name="autodist").stdout
    assert f"Usage: autodist {usage} " in told


def test_completion_of_a_shell_is_offered() -> None:
    assert "--install-completion" in RUNNER.invoke(app, ["--help"]).stdout


@pytest.mark.parametrize(
    "words, completed",
    [
        ("autodist v", ["verify"]),
        ("autodist check --no", ["--no-links"]),
        ("autodist plan --strategy Pa", ["Parallax", "PartitionedAR", "PartitionedPS"]),
        ("autodist run trai", []),  # files, which the shell completes
    ],
)
def test_a_shell_completes_commands_options_and_builders(words: str, completed: list[str]) -> None:
    asked = {"_AUTODIST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = RUNNER.invoke(app, [], env=asked, prog_name="autodist")
    assert (result.exit_code, result.stdout.split()) == (0, completed)
