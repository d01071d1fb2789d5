"""Runs under a real Slurm of two nodes on this machine; `./scripts/schedulers` installs it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.runs import within
from tests.schedulers.slurm import NODES, Slurm, missing
from tests.schedulers.training import Training

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason="Slurm is not installed; ./scripts/schedulers installs it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the nodes are namespaces, which root makes"),
]

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=output --open-mode=append\n"
RUN = "srun --label autodist run train.py\n"
ENDS = ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as made:
        yield made


class Job(Training):
    """A batch job of two nodes, whose first `slow` starts train slowly."""

    def __init__(
        self, slurm: Slurm, directory: Path, script: str = RUN, slow: int = 1, more: dict[str, object] | None = None
    ) -> None:
        super().__init__(directory, more)
        self._slurm = slurm
        (self.directory / "job.sh").write_text(HEAD + script)
        variables = slurm.environment | {"SLOW": str(slow)}
        submitted = self.start(slurm.command(["sbatch", "--parsable", "job.sh"]), variables, "submitted")
        assert submitted.wait(30) == 0, self.output("submitted")
        self.number = self.output("submitted").strip()

    def wait(self, state: str, limit: float = 200) -> dict[str, str]:
        """Waits for the end of the job in a state, and checks that nothing is left; returns the job's fields."""
        about = self._slurm.wait_for_state(self.number, ENDS, limit)
        assert about["JobState"] == state, (about, self.output())
        self.assert_nothing_is_left()
        return about

    def assert_nothing_is_left(self) -> None:
        self.assert_gone()
        self._slurm.wait_for_nodes()
        assert all(self._slurm.listening(node) == {"slurmd"} for node in NODES)

    def task(self, number: int) -> int:
        """Returns the process that Slurm has started as a task of the job."""
        (found,) = [process for process in self.processes() if _is_task(process, number)]
        return found


def _is_task(process: int, number: int) -> bool:
    """Returns True if a process is a task, and not the batch script, which has its number, too, or a task's child."""
    about = Path(f"/proc/{process}")
    parent = int((about / "stat").read_text().rpartition(")")[2].split()[1])
    is_step = Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd"
    words, variables = ((about / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
    return is_step and b"-m" in words and f"SLURM_PROCID={number}".encode() in variables


@pytest.fixture(scope="module")
def two_steps(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of two steps, one after the other."""
    script = "srun --label autodist run train.py first.npz 0 && srun --label python train.py second.npz 1\n"
    job = Job(slurm, tmp_path_factory.mktemp("steps"), script, slow=0)
    job.wait("COMPLETED")
    return job


def test_a_job_of_two_nodes_trains_as_one_device(two_steps: Job, alone: Training) -> None:
    """`srun autodist run`: status 0; the weights are those of one device within 1e-10"""
    two_steps.assert_weights(alone, name="first", rounding=1e-10)


def test_two_steps_of_a_job_train_one_after_the_other(two_steps: Job) -> None:
    """the second, `srun python`, trains on two workers, too, and ends with the bits of the first"""
    assert two_steps.output().count("trained on 2\n") == 4
    two_steps.assert_weights(two_steps, "first", "second")


def test_scancel_ends_both_tasks(slurm: Slurm, tmp_path: Path) -> None:
    """the output names SIGTERM as the cause; nothing is left before Slurm would kill; the job is CANCELLED"""
    job = Job(slurm, tmp_path)
    job.wait_until_it_trains()
    slurm.ask("scancel", job.number)
    job.wait("CANCELLED")
    assert "1: autodist: this process was sent SIGTERM, and ends its script" in job.output()
    assert job.has_left(1), job.output()  # a chief ends by SIGTERM as Python does, without exit handlers
    assert "Traceback" not in job.output() and "task 1: Killed" not in job.output(), job.output()


REQUEUED = """
#SBATCH --requeue --signal=TERM@60
srun --label autodist run train.py model.npz ${SLURM_RESTART_COUNT:-0} ||
    { [ $? = 143 ] && scontrol requeue "$SLURM_JOB_ID"; }
"""


def test_a_job_that_is_requeued_resumes(slurm: Slurm, tmp_path: Path, two_steps: Job) -> None:
    """at its time limit (`--signal`), then by `scontrol requeue`: resumes where it was, with the bits of one run"""
    job = Job(slurm, tmp_path, REQUEUED, 2, {"checkpoint": {"folder": "saved", "on_preempt": True}})
    job.wait_until_it_trains()
    minutes = (time.time() - (job.directory / "submitted").stat().st_mtime) // 60
    # At least a minute from now, since Slurm looks at the limits every half a minute.
    slurm.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes + 2:.0f}")
    assert within(150, lambda: slurm.about(job.number)["Restarts"] == "1"), job.output()
    slurm.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.wait_until_it_trains(run="1")
    slurm.ask("scontrol", "requeue", job.number)
    about = job.wait("COMPLETED", 240)
    assert about["Restarts"] == "2"
    assert job.output().count("resuming from step") == 2, job.output()
    job.assert_weights(two_steps, "first")


def test_a_killed_task_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """the chief names the node and the cause, and ends with status 1; the job has FAILED"""
    job = Job(slurm, tmp_path)
    job.wait_until_it_trains()
    os.kill(job.task(1), signal.SIGKILL)
    job.wait("FAILED")
    cause = "was lost: its process ended without a report: it was killed"
    assert f"0: autodist: error: {slurm.address('n2')} {cause}" in job.output(), job.output()
    assert "srun: error: n1: task 0: Exited with exit code 1\n" in job.output(), job.output()


def test_a_killed_chief_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    """task 1 reports that the chief went away; the job has FAILED"""
    job = Job(slurm, tmp_path)
    job.wait_until_it_trains()
    os.kill(job.task(0), signal.SIGKILL)
    job.wait("FAILED")
    assert "autodist: the chief went away" in job.output(), job.output()


def test_ctrl_c_of_srun_ends_both_tasks(slurm: Slurm, tmp_path: Path) -> None:
    """twice within a second, as srun requires: the output names SIGINT as the cause; nothing is left"""
    training = Training(tmp_path)
    command = ["srun", "--nodes=2", "--label", "autodist", "run", "train.py"]
    step = training.start(slurm.command(command), slurm.environment | {"SLOW": "1"})
    training.wait_until_it_trains()
    step.send_signal(signal.SIGINT)
    assert within(5, lambda: "interrupt (one more within 1 sec to abort)" in training.output()), training.output()
    step.send_signal(signal.SIGINT)
    assert step.wait(60) != 0
    training.assert_gone()
    slurm.wait_for_nodes()
    assert "1: autodist: this process was sent SIGINT, and ends its script" in training.output(), training.output()
    assert training.has_left(1)  # srun sends SIGTERM right after, which ends the chief
