"""Every example runs: on two workers of two replicas (or pipelines), without its AutoDist lines, and over SSH."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.cluster.hosts import HOST_KINDS, Hosts
from tests.cluster.runs import MARK, workers_here
from tests.equivalence.harness import ROOT, run_to_its_end
from tests.log_lines import is_log_line

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]

LIMIT = 150.0

AS_A_USER = "digits_keras"
"""Started as a user's, chief and worker; of the others both are forked, and TensorFlow there already."""


@dataclass(frozen=True)
class Example:
    """A shortened example.

    Attributes:
        script: its file's name, without the ending.
        arguments: that make it short.
        result: a pattern whose group is its final number.
        tolerance: largest difference of that number from one device: little more than rounding, except in graph mode,
            where the chief prints the loss of its own examples.
    """

    script: str
    arguments: tuple[str, ...]
    result: str
    tolerance: float

    def run(
        self, *arguments: str, script: Path | None = None, hosts: Hosts | None = None, forked_workers: int = 0
    ) -> float:
        """Runs it; nothing may be left of it. Returns the number that it ends with, which the chief alone prints."""
        command = [sys.executable, str(script or ROOT / "examples" / f"{self.script}.py"), *self.arguments, *arguments]
        if hosts is None:
            is_forked = script is not None or self.script != AS_A_USER
            ended = run_to_its_end(command, ROOT, LIMIT, is_forked=is_forked, forked_workers=forked_workers)
        else:
            mark = hosts.ssh["host1"]["shared_envs"][MARK]
            ended = run_to_its_end(command, ROOT, LIMIT, hosts.chief_command, mark)
        assert ended.problem is None, f"{ended.problem}\n{ended.output}"
        if script is None:
            of_tensorflow = [line for line in ended.output.splitlines() if is_log_line(re.sub(r"^\[\S+\] ", "", line))]
            assert of_tensorflow == []
        found = re.findall(self.result, ended.output, re.MULTILINE)
        assert len(found) == 1, ended.output
        return float(found[0])


EXAMPLES = {
    example.script: example
    for example in (
        Example("digits_keras", ("--epochs", "2"), r"^test accuracy ([\d.]+)$", 0.003),
        Example("digits_step", ("--steps", "60"), r"^test accuracy ([\d.]+)$", 0.003),
        Example("digits_tf1", ("--epochs", "2"), r"^test accuracy ([\d.]+)$", 0.003),
        Example("char_language_model", ("--steps", "20"), r"^loss ([\d.]+) nats", 0.001),
        Example("transformer_language_model", ("--steps", "10"), r"^loss ([\d.]+) nats", 0.001),
        Example("llama_layout_map", ("--steps", "10", "--layers", "1"), r"^loss ([\d.]+) nats", 0.001),
        Example("skip_gram", ("--steps", "40"), r"^loss ([\d.]+);", 0.05),
    )
}

# Each script and each YAML once at least.
CASES = [
    ("digits_keras", "cluster"),
    ("digits_step", "cluster_ps"),
    ("digits_tf1", "cluster"),
    ("char_language_model", "cluster_parallax"),
    ("skip_gram", "cluster_own_builder"),
    ("transformer_language_model", "cluster_pipeline"),
    ("transformer_language_model", "cluster_mesh"),
    ("llama_layout_map", "cluster_layout_map"),
]

NO_SCRIPT = "own_builder"
"""A module that cluster_own_builder.yml names."""


def test_no_example_is_left_out() -> None:
    files = {file.stem for file in (ROOT / "examples").glob("*.py")} - {NO_SCRIPT}
    assert files == set(EXAMPLES) == {script for script, _ in CASES}
    clusters = {file.stem for file in (ROOT / "examples").glob("cluster*.yml")}
    assert clusters == {cluster for _, cluster in CASES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


class Alone:
    """Runs examples without their AutoDist lines, each once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._results: dict[str, float] = {}

    def result(self, script: str) -> float:
        if script not in self._results:
            taken_out = [sys.executable, "scripts/without_autodist.py", f"examples/{script}.py"]
            text = run_to_its_end(taken_out, ROOT, LIMIT)
            assert text.problem is None, text.output
            assert "autodist" not in text.output.split('"""', 2)[2].lower(), text.output
            file = self._directory / f"{script}.py"
            file.write_text(text.output)
            shutil.copy(ROOT / "examples" / "digits.npz", self._directory)
            self._results[script] = EXAMPLES[script].run(script=file)
        return self._results[script]


@pytest.mark.parametrize("script, cluster", CASES)
def test_an_example_trains_on_two_workers_as_it_does_alone(script: str, cluster: str, alone: Alone) -> None:
    file = ROOT / "examples" / f"{cluster}.yml"
    others = workers_here(yaml.safe_load(file.read_text())) - 1
    many = EXAMPLES[script].run("--cluster", str(file), forked_workers=others)
    assert many == pytest.approx(alone.result(script), abs=EXAMPLES[script].tolerance)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    environment = {MARK: secrets.token_hex(8), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with HOST_KINDS[0](tmp_path_factory.mktemp("hosts"), count=1, environment=environment) as made:
        yield made


@pytest.mark.ssh
def test_an_example_trains_on_two_hosts_over_ssh_as_it_does_alone(hosts: Hosts, alone: Alone, tmp_path: Path) -> None:
    """All-reduce for dense variables and parameter servers for sparse ones."""
    cluster, example = tmp_path / "hosts.yml", EXAMPLES["skip_gram"]
    cluster.write_text(json.dumps({**hosts.spec(cpus=[0, 1]), "strategy": {"builder": "Parallax"}}))
    many = example.run("--cluster", str(cluster), hosts=hosts)
    assert many == pytest.approx(alone.result(example.script), abs=example.tolerance)
