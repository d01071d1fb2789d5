"""PMI: what `mpiexec` of MPICH and of Intel MPI starts (Hydra), and others that speak PMI."""

from __future__ import annotations

from typing import ClassVar

from autodist.cluster.environments import slurm
from autodist.cluster.environments.launcher_env import (
    CHIEF,
    DEFAULT_PORT,
    Environment,
    Given,
    LauncherEnv,
    index_and_count,
    told_chief,
)
from autodist.errors import ResourceSpecError

RANK, SIZE, LOCAL_SIZE = "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"


class PMI(LauncherEnv):
    """PMI_RANK=1 PMI_SIZE=4 MPI_LOCALNRANKS=2; and AUTODIST_CHIEF=node1:15000."""

    name: ClassVar[str] = "PMI"

    def is_there(self, environment: Environment) -> bool:
        if RANK not in environment or SIZE not in environment:
            return False
        # `srun --mpi=pmi2` sets both, and SLURM also says where the chief is; an mpiexec in a step counts by itself.
        asks = ((RANK, slurm.RANK), (SIZE, slurm.TASKS))
        return any(environment.get(own) != environment.get(other) for own, other in asks)

    def read(self, environment: Environment) -> Given:
        index, count = index_and_count(environment, RANK, SIZE)
        return Given(self.name, index, count, *chief_of_ranks(environment, self.name, LOCAL_SIZE, count))


def chief_of_ranks(environment: Environment, form: str, local: str, count: int) -> tuple[str, int]:
    """Host and port of rank 0, which MPI does not tell: AUTODIST_CHIEF, or this machine if all ranks are here.

    Raises:
        ResourceSpecError: it is not known.
    """
    told = told_chief(environment)
    if told is not None:
        return told
    if environment.get(local) == str(count):
        return "127.0.0.1", DEFAULT_PORT
    raise ResourceSpecError(
        f"{form} does not tell on which machine rank 0 runs; set {CHIEF} to HOST:PORT there, on all ranks (by `-x "
        f"{CHIEF}` of Open MPI's mpirun, `-genv` of others)."
    )
