"""Launcher environments of MPI: PMI (`mpiexec` of MPICH and Intel MPI, and others) and Open MPI's `mpirun`."""

from __future__ import annotations

from typing import ClassVar

from autodist.cluster.environments import slurm
from autodist.cluster.environments.launcher_env import (
    CHIEF,
    DEFAULT_PORT,
    Environment,
    Given,
    LauncherEnv,
    chief_in,
    index_and_count,
)
from autodist.errors import ResourceSpecError

_PMI_RANK, _PMI_SIZE, _PMI_LOCAL_SIZE = "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"
_OMPI_RANK, _OMPI_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_OMPI_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"


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

    def read(self, environment: Environment) -> Given:
        index, count = index_and_count(environment, _PMI_RANK, _PMI_SIZE)
        return Given(self.name, index, count, *_chief_of_ranks(environment, self.name, _PMI_LOCAL_SIZE, count))


class OpenMPI(LauncherEnv):
    """OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2; and AUTODIST_CHIEF=node1:15000."""

    name: ClassVar[str] = "Open MPI"

    def is_present(self, environment: Environment) -> bool:
        return _OMPI_RANK in environment and _OMPI_SIZE in environment

    def read(self, environment: Environment) -> Given:
        index, count = index_and_count(environment, _OMPI_RANK, _OMPI_SIZE)
        return Given(self.name, index, count, *_chief_of_ranks(environment, self.name, _OMPI_LOCAL_SIZE, count))


def _chief_of_ranks(environment: Environment, form: str, local: str, count: int) -> tuple[str, int]:
    """Returns the host and port of rank 0: AUTODIST_CHIEF, or this machine if all ranks run here.

    Raises:
        ResourceSpecError: the host is unknown; MPI does not set it.
    """
    chief = chief_in(environment)
    if chief is not None:
        return chief
    if environment.get(local) == str(count):
        return "127.0.0.1", DEFAULT_PORT
    raise ResourceSpecError(
        f"{form} does not report on which machine rank 0 runs; set {CHIEF} to HOST:PORT there, on all ranks (by `-x "
        f"{CHIEF}` of Open MPI's mpirun, `-genv` of others)."
    )
