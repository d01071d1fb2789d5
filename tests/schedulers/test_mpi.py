"""Runs under the real `mpirun` of Open MPI and of MPICH on two machines; `./scripts/schedulers` installs them."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.schedulers.mpi import HYDRA, OPEN_MPI, Launcher, Machines
from tests.schedulers.training import Training

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the machines are namespaces, which root makes"),
    pytest.mark.skipif(
        OPEN_MPI.is_missing or HYDRA.is_missing, reason="MPI is not installed; ./scripts/schedulers installs it"
    ),
]

LAUNCHERS = pytest.mark.parametrize("launcher", [OPEN_MPI, HYDRA], ids=["openmpi", "mpich"])


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture
def training(tmp_path: Path) -> Training:
    made = Training(tmp_path)
    made.environment["AUTODIST_SECRET"] = secrets.token_hex(16)
    return made


@LAUNCHERS
def test_mpirun_trains_on_two_machines_as_on_one_device(
    machines: Machines, training: Training, alone: Training, launcher: Launcher
) -> None:
    """status 0; the weights are those of one device within 1e-10"""
    process = training.start(machines.command(launcher, ["autodist", "run", "train.py"]), {})
    assert process.wait(240) == 0, training.output()
    assert training.output().count("trained on 2") == 2
    assert f"{launcher.name}: " in training.output()
    assert_nothing_is_left(machines, training)
    training.assert_weights(alone, rounding=1e-10)


def assert_nothing_is_left(machines: Machines, training: Training) -> None:
    training.assert_gone()
    assert machines.listening() == ""


@LAUNCHERS
def test_ctrl_c_of_mpirun_ends_both_processes(machines: Machines, training: Training, launcher: Launcher) -> None:
    """the output names the signal that mpirun sends, SIGTERM or SIGINT, or the end of the chief if the signal comes
    later; nothing is left"""
    process = training.start(machines.command(launcher, ["autodist", "run", "train.py"]), {"SLOW": "1"})
    training.wait_until_it_trains()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(60)  # MPICH's status is 0, whatever its processes end with
    assert_nothing_is_left(machines, training)
    causes = f"this process was sent {launcher.interrupt}, and ends its script", "the chief went away in the middle"
    assert any(cause in training.output() for cause in causes), training.output()
    assert training.has_left(1)


@LAUNCHERS
def test_a_killed_process_ends_the_other(machines: Machines, training: Training, launcher: Launcher) -> None:
    """mpirun names the signal, and its status is not 0; nothing is left"""
    process = training.start(machines.command(launcher, ["autodist", "run", "train.py"]), {"SLOW": "1"})
    training.wait_until_it_trains()
    (rank,) = [process for process in training.processes() if _is_follower(process)]
    os.kill(rank, signal.SIGKILL)
    assert process.wait(60) != 0
    assert launcher.killed in training.output(), training.output()  # it ends the chief at once, which may say nothing
    assert_nothing_is_left(machines, training)


def _is_follower(process: int) -> bool:
    return b"autodist.cluster.environments.follower" in Path(f"/proc/{process}/cmdline").read_bytes()
