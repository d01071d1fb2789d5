"""Open MPI: what `mpirun` of Open MPI starts."""

from __future__ import annotations

from typing import ClassVar

from autodist.cluster.environments.launcher_env import Environment, Given, LauncherEnv, index_and_count
from autodist.cluster.environments.pmi import chief_of_ranks

RANK, SIZE, LOCAL_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"


class OpenMPI(LauncherEnv):
    """OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2; and AUTODIST_CHIEF=node1:15000."""

    name: ClassVar[str] = "Open MPI"

    def is_there(self, environment: Environment) -> bool:
        return RANK in environment and SIZE in environment

    def read(self, environment: Environment) -> Given:
        index, count = index_and_count(environment, RANK, SIZE)
        return Given(self.name, index, count, *chief_of_ranks(environment, self.name, LOCAL_SIZE, count))
