"""The recipes for schedulers: AutoDist reads the environment that they set."""

from __future__ import annotations

import pathlib
import shlex
from typing import Any

import pytest
import yaml

from autodist.cli.run import find_given
from autodist.cluster.environments.launcher_env import OF_ONE_PROCESS
from autodist.cluster.environments.launchers import find
from autodist.versions import LOWEST_PYTHON

FOLDERS = ("strategies", "kernels", "proto")
EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_a_jobset_names_its_chief_and_how_many_pods_there_are() -> None:
    jobset, policy = documents("jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value", "a secret") for entry in container["env"]}
    assert set(environment) <= OF_ONE_PROCESS
    found = find(environment | {"JOB_COMPLETION_INDEX": "1"})
    assert found is not None
    assert (found.form, found.index, found.count) == ("Kubernetes", 1, job["template"]["spec"]["completions"])
    name = jobset["metadata"]["name"]
    assert found.chief == f"{name}-{job['name']}-0-0.{name}"
    assert (EXAMPLES.parent / container["command"][2]).is_file()
    assert policy["spec"]["podSelector"]["matchLabels"]["jobset.sigs.k8s.io/jobset-name"] == name


@pytest.mark.parametrize("service, index, count", [("chief", 0, 2), ("worker", 1, None)])
def test_compose_starts_each_by_hand(
    service: str, index: int, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compose,) = documents("compose.yaml")
    program, command, *words = shlex.split(compose["services"][service]["command"])
    assert (program, command) == ("autodist", "run")
    options = dict(zip(words[:-1:2], words[1:-1:2], strict=True))
    for name in OF_ONE_PROCESS:
        monkeypatch.setenv(name, "")  # restores later changes
        monkeypatch.delenv(name)
    workers = int(options["--workers"]) if "--workers" in options else None
    found = find_given(None, options["--join"], int(options["--index"]), workers)
    assert found is not None
    assert (found.index, found.count, found.chief, found.port) == (index, count, "chief", 15000)
    assert "chief" in compose["services"], "the name by which the others find it"
    assert (EXAMPLES.parent / words[-1]).is_file()
    assert all("ports" not in one for one in compose["services"].values())


def test_the_image_is_made_of_files_that_it_is_given() -> None:
    (compose,) = documents("compose.yaml")
    root = EXAMPLES.parent
    assert {(EXAMPLES / one["build"]["context"]).resolve() for one in compose["services"].values()} == {root}
    sent = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((root / name).exists() for name in sent)
    assert sent >= {"autodist", *FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE", "examples"}
    lines = (root / "Dockerfile").read_text().splitlines()
    copied = {shlex.split(line)[-2] for line in lines if line.startswith("COPY")}
    assert copied - {"."} <= sent
    python = {line.split()[1] for line in lines if line.startswith("FROM")}
    assert python == {f"python:{'.'.join(map(str, LOWEST_PYTHON))}-slim"}


def test_the_batch_script_starts_a_script_that_is_there() -> None:
    lines = (EXAMPLES / "slurm.sbatch").read_text().splitlines()
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert "autodist run" in srun
    assert (EXAMPLES.parent / srun.split()[-1]).is_file()
