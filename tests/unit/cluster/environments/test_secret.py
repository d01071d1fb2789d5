"""The source of the secret, and the permissions of its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autodist.cluster.environments.launcher_env import GivenCluster
from autodist.cluster.environments.secret import SecretSource, remove_drawn
from autodist.errors import ResourceSpecError

STEP = GivenCluster("SLURM", 0, 2, "node1", job="slurm-17-0")
HAND = GivenCluster("by hand", 0, 2, "10.0.0.1")


def test_the_variable_is_taken_out_of_the_environment() -> None:
    environment = {"AUTODIST_SECRET": "x" * 16}
    source = SecretSource.find(HAND, environment)
    assert source.make() == source.read() == b"x" * 16
    assert environment == {}


def test_a_file_is_read_without_the_end_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("y" * 20 + "\n")
    assert SecretSource.find(HAND, {"AUTODIST_SECRET_FILE": str(file)}).make() == b"y" * 20
    with pytest.raises(ResourceSpecError, match="AUTODIST_SECRET_FILE is .*/none, which does not exist"):
        SecretSource.find(HAND, {"AUTODIST_SECRET_FILE": str(tmp_path / "none")}).read()


@pytest.mark.parametrize("given", [STEP, GivenCluster("Open MPI", 0, 2, "127.0.0.1")], ids=["SLURM", "one machine"])
def test_the_chief_leaves_one_in_the_home_directory_for_its_user_alone(
    given: GivenCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chief, other = SecretSource.find(given, {}), SecretSource.find(given, {})
    with pytest.raises(FileNotFoundError):
        other.read()
    secret = chief.make()
    assert other.read() == secret
    assert len(secret) == 64
    (file,) = (tmp_path / ".autodist").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert chief.make() != secret, "each run draws its own"
    chief.forget()
    assert not list((tmp_path / ".autodist").iterdir())


def test_a_file_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = SecretSource.find(STEP, {})
    source.make()
    assert source.file is not None
    os.chmod(source.file, 0o640)
    with pytest.raises(ResourceSpecError, match="is accessible to other users; remove the file"):
        source.read()


def test_without_a_secret_and_with_a_short_one_the_fix_is_reported() -> None:
    with pytest.raises(ResourceSpecError, match="AUTODIST_SECRET is missing: .*`openssl rand -hex 32` generates one"):
        SecretSource.find(HAND, {})
    with pytest.raises(ResourceSpecError, match="the secret in AUTODIST_SECRET has 3 characters; allowed: at least 16"):
        SecretSource.find(HAND, {"AUTODIST_SECRET": "abc"})


def test_without_a_home_directory_the_variable_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", absent)
    with pytest.raises(ResourceSpecError, match="no home directory .*; set AUTODIST_SECRET instead"):
        SecretSource.find(STEP, {})


def test_the_server_removes_the_secret_of_its_own_run_only(tmp_path: Path) -> None:
    file = tmp_path / "port-15000"
    remove_drawn(str(file), "the secret of a run")
    file.write_text("the secret of a later run")
    remove_drawn(str(file), "the secret of a run")
    assert file.exists()
    remove_drawn(str(file), "the secret of a later run")
    assert not file.exists()
