"""The launcher environments except SLURM's, and the detection of the one in which this process was started."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, ValidationError

from autodist.cluster.environments import slurm
from autodist.cluster.environments.launcher_env import (
    CHIEF,
    INDEX,
    MAX_WORKERS,
    WORKERS,
    Environment,
    GivenCluster,
    LauncherEnv,
    chief_in,
    host_and_port_of,
    index_and_count,
    number_of,
    text_of,
)
from autodist.errors import ResourceSpecError

_log = logging.getLogger("autodist.cluster")


class Manual(LauncherEnv):
    """AUTODIST_INDEX=1 AUTODIST_WORKERS=3 AUTODIST_CHIEF=node1:15000; only the chief needs AUTODIST_WORKERS."""

    name: ClassVar[str] = "by hand"

    def is_present(self, environment: Environment) -> bool:
        return INDEX in environment

    def read(self, environment: Environment) -> GivenCluster:
        index = number_of(environment, INDEX, "the number of this process, counted from 0", 0, MAX_WORKERS)
        count = None
        if index == 0 or WORKERS in environment:
            index, count = index_and_count(environment, INDEX, WORKERS)
        text_of(environment, CHIEF, "HOST:PORT, where the process with index 0 runs")
        chief = chief_in(environment)
        assert chief is not None, "the variable is set"
        return GivenCluster(self.name, index, count, *chief)


_PMI_RANK, _PMI_SIZE = "PMI_RANK", "PMI_SIZE"
_OMPI_RANK, _OMPI_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"


class PMI(LauncherEnv):
    """PMI_RANK=1 PMI_SIZE=4 MPI_LOCALNRANKS=2; and AUTODIST_CHIEF=node1:15000."""

    name: ClassVar[str] = "PMI"

    def is_present(self, environment: Environment) -> bool:
        if _PMI_RANK not in environment or _PMI_SIZE not in environment:
            return False
        # `srun --mpi=pmi2` sets both, but SLURM's variables also name the chief. An `mpiexec` in a SLURM step has other
        # values and takes precedence.
        pairs = ((_PMI_RANK, slurm.RANK), (_PMI_SIZE, slurm.TASKS))
        return any(environment.get(pmi) != environment.get(other) for pmi, other in pairs)

    def read(self, environment: Environment) -> GivenCluster:
        return _read_ranks(environment, self.name, _PMI_RANK, _PMI_SIZE, "MPI_LOCALNRANKS")


class OpenMPI(LauncherEnv):
    """OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2; and AUTODIST_CHIEF=node1:15000."""

    name: ClassVar[str] = "Open MPI"

    def is_present(self, environment: Environment) -> bool:
        return _OMPI_RANK in environment and _OMPI_SIZE in environment

    def read(self, environment: Environment) -> GivenCluster:
        return _read_ranks(environment, self.name, _OMPI_RANK, _OMPI_SIZE, "OMPI_COMM_WORLD_LOCAL_SIZE")


def _read_ranks(environment: Environment, launcher: str, rank: str, size: str, local_size: str) -> GivenCluster:
    """Reads a cluster of ranks; rank 0 runs at AUTODIST_CHIEF, or on this machine if all ranks do.

    Raises:
        ResourceSpecError: a variable is malformed, or the host of rank 0 is unknown; MPI does not set it.
    """
    index, count = index_and_count(environment, rank, size)
    chief = chief_in(environment)
    if chief is None and environment.get(local_size) != str(count):
        raise ResourceSpecError(
            f"{launcher} does not report on which machine rank 0 runs; set {CHIEF} to HOST:PORT there, on all ranks "
            f"(by `-x {CHIEF}` of Open MPI's mpirun, `-genv` of others)."
        )
    return GivenCluster(launcher, index, count, *(chief or ("127.0.0.1",)))


POD_INDEX = "JOB_COMPLETION_INDEX"


class Kubernetes(LauncherEnv):
    """JOB_COMPLETION_INDEX=1, and AUTODIST_WORKERS=4, which the manifest has to set: Kubernetes does not pass it.

    The pods of a Job are called JOB-INDEX, with a headless service JOB-INDEX.SERVICE. So the chief's name is this
    pod's name with the index 0, unless AUTODIST_CHIEF overrides it.

    Args:
        own_name: returns this pod's fully qualified name.
    """

    name: ClassVar[str] = "Kubernetes"

    def __init__(self, own_name: Callable[[], str] = socket.getfqdn) -> None:
        self._own_name = own_name

    def is_present(self, environment: Environment) -> bool:
        # Without WORKERS, the pods of a Job do not belong together.
        return POD_INDEX in environment and WORKERS in environment

    def read(self, environment: Environment) -> GivenCluster:
        index, count = index_and_count(environment, POD_INDEX, WORKERS)
        return GivenCluster(self.name, index, count, *(chief_in(environment) or (self._chief(index),)))

    def _chief(self, index: int) -> str:
        pod, dot, service = self._own_name().partition(".")
        job, dash, number = pod.rpartition("-")
        if number != str(index) or not (dash and dot):
            raise ResourceSpecError(
                f"this pod is called {(pod + dot + service)[:60]!r}, from which the chief's name does not follow (it "
                f"would from JOB-{index}.SERVICE); give the pods a headless service as their `subdomain`, or set "
                f"{CHIEF}."
            )
        return f"{job}-0{dot}{service}"


_Addresses = Annotated[list[str], Field(default_factory=list)]

TF_CONFIG = "TF_CONFIG"


class _Cluster(BaseModel):
    chief: _Addresses
    master: _Addresses  # the chief's old name
    worker: _Addresses
    ps: _Addresses
    evaluator: _Addresses


class _Task(BaseModel):
    type: str
    index: Annotated[int, Field(ge=0)]


class _Config(BaseModel):
    cluster: _Cluster
    task: _Task


class TFConfig(LauncherEnv):
    """{"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}, "task": {"type": "worker", "index": 0}}.

    The chief is the `chief` or, without one, worker 0. Its port is used by the rendezvous server, then by its server.
    """

    name: ClassVar[str] = TF_CONFIG

    def is_present(self, environment: Environment) -> bool:
        return bool(environment.get(TF_CONFIG))

    def read(self, environment: Environment) -> GivenCluster:
        config = _parse(text_of(environment, TF_CONFIG, "the cluster and this task, as JSON"))
        cluster, task = config.cluster, config.task
        _require_workers(cluster, task)
        chiefs = cluster.chief or cluster.master
        if len(chiefs) > 1:
            raise ResourceSpecError(f"{TF_CONFIG} names {len(chiefs)} chiefs; allowed: one, or none and only workers.")
        addresses = [*chiefs, *cluster.worker]
        if not addresses:
            raise ResourceSpecError(f"{TF_CONFIG} names no chief and no worker under cluster; allowed: one or more.")
        of_type = chiefs if task.type in ("chief", "master") else cluster.worker
        if task.index >= len(of_type):
            raise ResourceSpecError(
                f"{TF_CONFIG} has the task {task.type} {task.index}, but the cluster has {len(of_type)} of this type; "
                "allowed: an index below that."
            )
        index = task.index if of_type is chiefs else len(chiefs) + task.index
        hosts = [host_and_port_of(address, f"an address in {TF_CONFIG}", None) for address in addresses]
        if len(set(hosts)) < len(hosts):
            raise ResourceSpecError(f"{TF_CONFIG} names one address twice; allowed: each task's own.")
        return GivenCluster(self.name, index, len(addresses), *hosts[0], addresses=tuple(addresses))


def _parse(text: str) -> _Config:
    try:
        return _Config.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResourceSpecError(
            f"{TF_CONFIG} cannot be read{f' at {where}' if where else ''}: {first['msg']}; allowed: "
            '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": 0}}.'
        ) from None


def _require_workers(cluster: _Cluster, task: _Task) -> None:
    if task.type == "evaluator" or cluster.evaluator:
        raise ResourceSpecError(
            f"{TF_CONFIG} has an evaluator, which AutoDist does not support: run it separately, without {TF_CONFIG}, "
            "or remove it and evaluate in the script."
        )
    if task.type == "ps" or cluster.ps:
        raise ResourceSpecError(
            f"{TF_CONFIG} has parameter servers (ps), which AutoDist does not need: remove them and set `strategy: "
            "PS`; a worker then owns the variables."
        )
    if task.type not in ("chief", "master", "worker"):
        raise ResourceSpecError(f"{TF_CONFIG} has a task of type {task.type[:60]!r}; allowed: chief or worker.")


LAUNCHERS: tuple[LauncherEnv, ...] = (Manual(), TFConfig(), OpenMPI(), PMI(), slurm.Slurm(), Kubernetes())
"""In order of precedence: explicit settings, the launcher of this process, the launchers that may have started it."""


def find(environment: Environment) -> GivenCluster | None:
    """Reads the cluster from the environment; returns None if there is no launcher environment.

    Raises:
        ResourceSpecError: names the variable that is missing or malformed.
    """
    present = [launcher for launcher in LAUNCHERS if launcher.is_present(environment)]
    if not present:
        return None
    given = present[0].read(environment)
    if len(present) > 1:
        others = " and ".join(launcher.name for launcher in present[1:])
        _log.info("the environment has %s and %s: %s takes precedence", present[0].name, others, present[0].name)
    return given


def require(environment: Environment) -> GivenCluster:
    """Same as `find`, for a run that requires a launcher environment.

    Raises:
        ResourceSpecError: there is none, or `find` raises it.
    """
    given = find(environment)
    if given is not None:
        return given
    if POD_INDEX in environment:
        raise ResourceSpecError(
            f"the environment variable {WORKERS} is missing; set it to the Job's `completions`, which Kubernetes does "
            "not pass to the pods."
        )
    names = ", ".join(launcher.name for launcher in LAUNCHERS[1:])
    raise ResourceSpecError(
        f"nodes: given, but this process's environment is none of {names} (with several processes). "
        f"Start it by such a scheduler, by `autodist run --join HOST:PORT --index K`, or with {INDEX}, {WORKERS} and "
        f"{CHIEF}."
    )
