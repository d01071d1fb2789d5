"""`autodist run`: a script on local workers, run as by Python, and its errors."""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autodist.cli import launched
from autodist.cli.app import app
from autodist.cli.command_errors import UsageError
from autodist.cli.run import NodeRange, find_given
from autodist.cluster.environments.launcher_env import OF_ONE_PROCESS
from autodist.errors import ResourceSpecError, StrategyError
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import VARIABLE
from tests.cluster.runs import MARK
from tests.forked_python.start import ON_CPU, forked_python

RUNNER = CliRunner()

HEAD = """
import os, sys
import numpy as np
from autodist import AutoDist
import tensorflow as tf
"""

STEP = (
    HEAD
    + """
ad = AutoDist()
with ad.scope():
    weight = tf.Variable(np.ones((3, 2)), name="weight")

    @ad.function(batch="global")
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    loss = step(np.ones((4, 3)))
"""
)


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def run(*words: str, folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autodist", "run", *words]
    return subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, check=False, timeout=240)


def run_forked(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Like `run`, but forks the command from a process that has imported TensorFlow."""
    became: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        became.append((command, environment))
        raise SystemExit

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "execve", execve)
        patched.chdir(folder)
        RUNNER.invoke(app, ["run", *words])
    ((command, environment),) = became
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr, open(os.devnull, "rb") as nothing:
        environment |= ON_CPU | {MARK: secrets.token_hex(8)}
        process = forked_python.start(command[1:], (nothing, stdout, stderr), environment, folder, chains=0)
    assert process is not None, "its environment is another one"
    return subprocess.CompletedProcess(command, process.wait(), out.read_text(), err.read_text())


@pytest.mark.processes
def test_a_module_runs_on_workers_with_its_arguments_input_and_exit_status(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", "", "__init__.py")
    told = f"""
print("loss", float(loss), "of", ad.num_workers, ad.num_replicas, sys.argv[1:], {VARIABLE!r} in os.environ, flush=True)
ad.reduce(0.0)  # all have printed: the failure of the chief's script ends the others
if ad.is_chief:
    sys.exit(int(sys.stdin.readline()))
"""
    write(tmp_path / "package", STEP + told)
    words = ["--workers", "2", "--replicas", "2", "--strategy", "PS", "-m", "package.train", "--workers", "9"]
    ended = run(*words, folder=tmp_path, given="7\n")
    assert ended.returncode == 7, ended.stderr
    assert "loss 9.0 of 2 4 ['--workers', '9'] False\n" in ended.stdout
    assert "[localhost:1] loss 9.0 of 2 4 ['--workers', '9'] False" in ended.stdout
    assert "PS: 4 replicas on 2 workers" in ended.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "text, status, told",
    [
        ("print('no training')", 2, "train.py created no AutoDist"),
        (HEAD + "AutoDist()\nAutoDist()", 2, "the script makes two AutoDist objects"),
        (HEAD + "AutoDist()\nsys.exit(0)", 2, "train.py ended before a step of its AutoDist"),
        ("raise ValueError('of its own')", 1, 'Traceback (most recent call last):\n  File "{script}", line 1'),
        (STEP, 0, ""),
        (HEAD + "def make():\n    AutoDist('no.yml')\nmake()", 1, "YAML file ({script}:7)\n"),
    ],
)
def test_a_script_that_trains_nothing_on_the_machines_is_refused(
    tmp_path: Path, text: str, status: int, told: str
) -> None:
    script = write(tmp_path, text)
    start = run if told.startswith("Traceback") else run_forked  # a traceback would show how it was forked
    ended = start("--replicas", "2", script, folder=tmp_path)
    assert ended.returncode == status, ended.stderr
    assert told.format(script=script) in ended.stderr
    assert ("Traceback" in ended.stderr) == told.startswith("Traceback")


def test_errors_of_autodist_s_are_words_with_the_script_s_line_unless_all_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, "def use(error):\n    raise error\n\nuse(ERROR)\n")
    shown: list[BaseException] = []
    for error, shows_all, told in [
        (StrategyError("it cannot be done"), False, f"autodist: error: it cannot be done ({script}:2)\n"),
        (StrategyError("it cannot be done"), True, ""),
        (ValueError("of its own"), False, ""),
    ]:
        with pytest.raises(type(error)) as raised:
            runpy.run_path(script, {"ERROR": error}, "__main__")
        launched._without_our_frames(
            lambda kind, error, trace: shown.append(error), shows_all, type(error), error, raised.tb
        )
        assert capsys.readouterr().err == told
    assert [str(error) for error in shown] == ["it cannot be done", "of its own"]


@pytest.mark.processes
def test_an_interrupted_script_ends_as_under_python(tmp_path: Path) -> None:
    # A shell's background jobs ignore Ctrl-C.
    hears = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = write(tmp_path, hears + "import time\nprint('ready', flush=True)\ntime.sleep(200)\n")
    command = [sys.executable, "-m", "autodist", "run", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors and "Aborted" not in errors


@pytest.mark.processes
def test_a_strategy_that_is_none_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    ended = run_forked("--strategy", "AllReduced", write(tmp_path, "print('it ran')"), folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("autodist: error: There is no builder named AllReduced")


def test_a_dry_run_shows_each_process_and_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    script = write(tmp_path, STEP + "raise RuntimeError('the step was made')\n")
    cluster = write(
        tmp_path,
        """
nodes:
  - {address: 10.99.0.1, cpus: [0], chief: true, port: 15000}
  - {address: 10.99.0.2, cpus: [0, 1], ssh_config: lab}
  - {address: 10.99.0.3, cpus: [], ssh_config: lab}
ssh: {lab: {username: somebody}}
strategy: PS
""",
        "cluster.yml",
    )
    words = ["run", "--cluster", cluster, "--dry-run", script, "--epochs", "3"]
    result = RUNNER.invoke(app, words, env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.stderr
    assert f"{script} --epochs 3 would run as" in result.stdout
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "10.99.0." in line]
    assert [[cell.strip() for cell in row] for row in rows[:3]] == [
        ["10.99.0.1", "cpu:0", "in this process", "15000"],
        ["10.99.0.2", "cpu:0, cpu:1", "over SSH at 10.99.0.2, group lab", "a free one"],
        ["10.99.0.3", "none: it owns variables", "over SSH at 10.99.0.3, group lab", "a free one"],
    ]
    assert "PS (the script's): 3 replicas on 3 workers" in result.stdout


def test_a_script_that_cannot_run_is_refused_with_status_2(tmp_path: Path) -> None:
    script = write(tmp_path, "raise SystemExit('it ran')")
    wrong = write(tmp_path, "nodes: [{address: localhost, gpu: [0]}]", "cluster.yml")
    for words, told in [
        ([str(tmp_path / "missing.py")], "does not exist"),
        (["--cluster", wrong, script], "cluster.yml:1: nodes[0].gpu"),
        (["--cluster", wrong, "--workers", "2", script], "leave out --workers"),
        (["--no-such-option", script], "--no-such-option"),
    ]:
        result = RUNNER.invoke(app, ["run", *words])
        assert (result.exit_code, result.stdout) == (2, ""), words
        assert told in result.stderr and "it ran" not in result.stderr, result.stderr


def test_options_of_processes_that_are_started_by_hand_are_looked_at_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    given, named = tmp_path / "given.yml", tmp_path / "named.yml"
    given.write_text("nodes: given\n")
    named.write_text("nodes: [{address: localhost}]\n")
    join, script = ["--join", "10.0.0.1:15000"], str(tmp_path / "train.py")
    for options, problem in [
        (join, "--join and --index belong together"),
        (["--index", "1"], "--join and --index belong together"),
        ([*join, "--index", "0"], "needs the number of processes: add --workers"),
        (["--join", "10.0.0.1", "--index", "1"], "--join is '10.0.0.1'; allowed: HOST:PORT"),
        ([*join, "--index", "1", "--cluster", str(named)], "the YAML of --cluster names machines"),
        ([*join, "--index", "3", "--workers", "2"], "AUTODIST_INDEX is 3, and AUTODIST_WORKERS is 2"),
        ([*join, "--index", "0", "--workers", "2", "--dry-run"], "--dry-run starts nothing"),
        (["--cluster", str(given)], "this process's environment is none of"),
    ]:
        ended = RUNNER.invoke(app, ["run", *options, script], env=dict.fromkeys(OF_ONE_PROCESS))
        assert ended.exit_code == 2, (options, ended.output)
        assert problem in ended.stderr, options


def test_a_step_of_slurm_is_found_unless_the_options_name_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "5",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = find_given(None, None, None, None)
    assert found is not None
    assert (found.form, found.index, found.chief) == ("SLURM", 1, "n1")
    assert find_given(None, None, None, 2) is None
    assert find_given(ResourceSpec.from_dict({"nodes": [{"address": "a"}]}), None, None, None) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert find_given(None, None, None, None) is None, "a step of one task is no cluster"
    alone = find_given(ResourceSpec.from_dict({"nodes": "given"}), None, None, None)
    assert alone is not None
    assert alone.count == 1


@pytest.mark.parametrize("command", ["plan", "check"])
def test_machines_that_are_not_known_yet_are_not_looked_at(command: str, tmp_path: Path) -> None:
    given = write(tmp_path, "nodes: given", "given.yml")
    script = write(tmp_path, STEP)
    words = [given] if command == "check" else ["--cluster", given, script]
    ended = RUNNER.invoke(app, [command, *words])
    assert ended.exit_code == 2, ended.output
    assert "are not known until" in ended.stderr


@pytest.mark.parametrize(
    ("text", "least", "most"), [("2:8", 2, 8), ("1:1", 1, 1), ("4", 4, 4)], ids=["range", "one", "a number"]
)
def test_a_range_of_processes_is_read(text: str, least: int, most: int) -> None:
    assert NodeRange.parse(text) == NodeRange(least, most)


@pytest.mark.parametrize("text", ["8:2", "0:2", "2:", ":2", "a:b", "2:3:4", "-1:2", "1:1000001", ""])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes is .*; allowed: MIN:MAX, two whole numbers from 1 to"):
        NodeRange.parse(text)


def test_a_range_sets_the_number_of_processes_by_hand_and_is_compared_with_a_scheduler_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in OF_ONE_PROCESS:
        monkeypatch.setenv(name, "")  # restores later changes
        monkeypatch.delenv(name)
    found = find_given(None, "n1:15000", 0, None, NodeRange(2, 3))
    assert found is not None and (found.index, found.count) == (0, 3)
    with pytest.raises(UsageError, match="--nodes and --workers both set the number of workers"):
        find_given(None, "n1:15000", 0, 3, NodeRange(2, 3))
    with pytest.raises(UsageError, match="--nodes and the YAML of --cluster both set"):
        find_given(ResourceSpec.from_dict({"nodes": [{"address": "a"}]}), None, None, None, NodeRange(2, 3))
    monkeypatch.setenv("AUTODIST_WORKERS", "4")
    with pytest.raises(UsageError, match=r"--nodes 2:3, but there are 4 processes \(by hand\); .* second number: 4"):
        find_given(None, None, None, None, NodeRange(2, 3))
    for name in OF_ONE_PROCESS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ResourceSpecError, match="by `autodist run --join HOST:PORT --index K`"):
        find_given(None, None, None, None, NodeRange(2, 3))
