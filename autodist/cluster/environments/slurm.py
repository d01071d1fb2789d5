"""Launcher environment of SLURM: the steps of a job, which `srun` starts."""

from __future__ import annotations

import re
from typing import ClassVar

from autodist.cluster.environments.launcher_env import (
    Environment,
    GivenCluster,
    LauncherEnv,
    chief_in,
    index_and_count,
    number_of,
    text_of,
)
from autodist.errors import ResourceSpecError

RANK, TASKS, NODES, CORES = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_CPUS_PER_TASK"
JOB_NODES = "SLURM_JOB_NUM_NODES"
_PORTS = range(10000, 15000)
_PORTS_APART = 1009  # of two steps of a job: other jobs that run at the same time have near numbers

# The prefix of the first host and the first number in its brackets, if it has any: "gpu[007-9,12],login".
_FIRST = re.compile(r"([^,\[\]]+)(?:\[(\d+)[^\]\[]*\])?(?:,|\Z)")


class Slurm(LauncherEnv):
    """SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=node[01-02] SLURM_JOB_ID=17 SLURM_STEP_ID=0.

    A batch script and an interactive session have a job, but no such step. Task 0 is the chief, which runs on the first
    node. The port depends on the numbers of job and step, so that those that share a node do not collide.
    """

    name: ClassVar[str] = "SLURM"

    def is_present(self, environment: Environment) -> bool:
        return RANK in environment and TASKS in environment

    def read(self, environment: Environment) -> GivenCluster:
        index, count = index_and_count(environment, RANK, TASKS)
        job = number_of(environment, "SLURM_JOB_ID", "the job's number", 0, 10**9 - 1)
        step = environment.get("SLURM_STEP_ID", "0")
        number = int(step) if step.isascii() and step.isdecimal() else 0
        port = _PORTS[(job + number * _PORTS_APART) % len(_PORTS)]
        host, port = chief_in(environment, port) or (first_host(environment), port)
        cores = number_of(environment, CORES, "the cores of a task", 1, 10**6) if CORES in environment else None
        return GivenCluster(self.name, index, count, host, port, job=f"slurm-{job}-{step}", cores=cores)


def allocated_nodes(environment: Environment) -> int:
    """Returns the number of nodes of the job if this process runs outside of any step; 0 in a step or without a job.

    A batch script, and the programs that it starts without `srun`, run once, on the job's first node.
    """
    count = environment.get(JOB_NODES, "")
    return int(count) if count.isdecimal() and not Slurm().is_present(environment) else 0


def first_host(environment: Environment) -> str:
    """Returns the first of the step's hosts, as `tf.distribute.cluster_resolver` and `scontrol show hostnames` do.

    Parses the list itself, since importing TensorFlow takes seconds in a process that does not train.

    Raises:
        ResourceSpecError: the list is missing or malformed.
    """
    hosts = text_of(environment, NODES, "the step's hosts, as srun does")
    match = _FIRST.match(hosts)
    if match is None:
        raise ResourceSpecError(
            f"the environment variable {NODES} is {hosts[:60]!r}; allowed: a list of hosts such as node[01-02]."
        )
    return match[1] + (match[2] or "")
