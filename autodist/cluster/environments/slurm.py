"""A step of a SLURM job: what `srun` starts."""

from __future__ import annotations

import re
from typing import ClassVar

from autodist.cluster.environments.launcher_env import (
    Environment,
    Given,
    LauncherEnv,
    index_and_count,
    number_of,
    text_of,
    told_chief,
)
from autodist.errors import ResourceSpecError

RANK, TASKS, NODES, CORES = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_CPUS_PER_TASK"
JOB_NODES = "SLURM_JOB_NUM_NODES"
_PORTS = range(10000, 15000)

# The prefix of the first host and, where it has one, the first number in its brackets: "gpu[007-9,12],login".
_FIRST = re.compile(r"([^,\[\]]+)(?:\[(\d+)[^\]\[]*\])?(?:,|\Z)")


class Slurm(LauncherEnv):
    """SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=node[01-02] SLURM_JOB_ID=17 SLURM_STEP_ID=0.

    A batch script and an interactive step have a job, and no such step. Task 0 is the chief, which runs on
    the first node. The port goes by the job's number, so that jobs which share a node keep apart.
    """

    name: ClassVar[str] = "SLURM"

    def is_there(self, environment: Environment) -> bool:
        return RANK in environment and TASKS in environment

    def read(self, environment: Environment) -> Given:
        index, count = index_and_count(environment, RANK, TASKS)
        job = number_of(environment, "SLURM_JOB_ID", "the job's number", 0, 10**9 - 1)
        step = environment.get("SLURM_STEP_ID", "0")
        port = _PORTS[job % len(_PORTS)]
        host, port = told_chief(environment, port) or (first_host(environment), port)
        cores = number_of(environment, CORES, "the cores of a task", 1, 10**6) if CORES in environment else None
        return Given(self.name, index, count, host, port, job=f"slurm-{job}-{step}", cores=cores)


def allocated_nodes(environment: Environment) -> int:
    """Number of nodes of the job that this process runs in, outside of any step; 0 in a step or without a job.

    A batch script runs once, on the job's first node, and so does what it starts without `srun`.
    """
    told = environment.get(JOB_NODES, "")
    return int(told) if told.isdecimal() and not Slurm().is_there(environment) else 0


def first_host(environment: Environment) -> str:
    """The first of the step's hosts, as `tf.distribute.cluster_resolver` and `scontrol show hostnames` have them.

    Read here: TensorFlow takes seconds to import, in a process that trains nothing itself.

    Raises:
        ResourceSpecError: there is no list, or it is malformed.
    """
    hosts = text_of(environment, NODES, "the step's hosts, as srun does")
    found = _FIRST.match(hosts)
    if found is None:
        raise ResourceSpecError(
            f"the environment variable {NODES} is {hosts[:60]!r}; allowed: a list of hosts such as node[01-02]."
        )
    return found[1] + (found[2] or "")
