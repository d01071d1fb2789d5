"""bench.py: what a command measures, and the processes of each way of training."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.comparisons import comparisons
from bench.frameworks import PACKAGES
from bench.jobs import SCRIPTS, Job, Length, Way


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("bench_program", SCRIPTS / "bench.py")  # the package has its name
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measured(program: Any, **chosen: Any) -> list[str]:
    arguments = argparse.Namespace(**{"only": None, "model": None, "repeat": 1, "steps": 1, "image": 96} | chosen)
    return [one.name for one in program._measurements(arguments)]


def test_every_comparison_is_in_a_group_of_the_command(program: Any) -> None:
    assert {one.group for one in comparisons()} <= program.GROUPS.keys()
    assert all(measured(program, only=[group]) for group in program.GROUPS)


def test_everything_does_not_contain_what_takes_other_environments_or_half_an_hour(program: Any) -> None:
    on_request = {name for group in program.ON_REQUEST for name in measured(program, only=[group])}
    assert on_request and not on_request & set(measured(program))


def test_a_model_of_other_frameworks(program: Any) -> None:
    names = measured(program, only=["frameworks"], model=["lstm"])
    assert [name.partition(" and ")[2] for name in names] == [
        "lstm: jax, 1 × 1", "lstm: jax, 1 × 2", "lstm: jax, 2 × 1", "lstm: torch, 1 × 1", "lstm: torch, 2 × 1",
    ]  # fmt: skip


@pytest.mark.parametrize("framework", PACKAGES)
def test_each_process_of_another_framework_has_its_interpreter_and_an_address_of_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, framework: str
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Started:
        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            started.append((command, env))

    monkeypatch.setattr("bench.jobs.subprocess.Popen", Started)
    monkeypatch.setattr("bench.jobs.python_of", lambda way: f"python of {way}")
    monkeypatch.setattr(Job, "_answer", lambda self: b"ready")
    Job(Way(framework, "mlp", workers=2), Length(1, 1, 1, 1, 10), tmp_path).start()
    commands = [command[:5] for command, _ in started]
    assert commands == [[f"python of {framework}", "-m", "bench.train_elsewhere", framework, "mlp"]] * 2
    environments = [env for _, env in started]
    assert {env["KERAS_BACKEND"] for env in environments} == {framework}
    (addresses,) = {env["BENCH_ADDRESSES"] for env in environments}
    assert addresses.count("127.0.0.1:") == 2
    assert all("TF_CONFIG" not in env for env in environments)
