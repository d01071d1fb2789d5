"""An indexed Job of Kubernetes, or a JobSet: one pod for each completion index, found by a headless service."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import ClassVar

from autodist.cluster.environments.launcher_env import (
    CHIEF,
    WORKERS,
    Environment,
    Given,
    LauncherEnv,
    index_and_count,
    told_chief,
)
from autodist.errors import ResourceSpecError

RANK = "JOB_COMPLETION_INDEX"


class Kubernetes(LauncherEnv):
    """JOB_COMPLETION_INDEX=1, and AUTODIST_WORKERS=4, which the manifest has to say: no pod is told of the others.

    The pods of a Job are called JOB-INDEX, under a headless service JOB-INDEX.SERVICE. So the chief's name is this
    pod's with 0 in place of its index, unless AUTODIST_CHIEF says otherwise.

    Args:
        own_name: gives this pod's whole name.
    """

    name: ClassVar[str] = "Kubernetes"

    def __init__(self, own_name: Callable[[], str] = socket.getfqdn) -> None:
        self._own_name = own_name

    def is_there(self, environment: Environment) -> bool:
        return RANK in environment and WORKERS in environment  # without that, the pods of a Job know nothing of another

    def read(self, environment: Environment) -> Given:
        index, count = index_and_count(environment, RANK, WORKERS)
        return Given(self.name, index, count, *(told_chief(environment) or (self._chief(index),)))

    def _chief(self, index: int) -> str:
        pod, dot, service = self._own_name().partition(".")
        job, dash, number = pod.rpartition("-")
        if number != str(index) or not (dash and dot):
            raise ResourceSpecError(
                f"this pod is called {(pod + dot + service)[:60]!r}, which does not tell how the chief's is reached "
                f"(JOB-{index}.SERVICE would); give the pods a headless service as their `subdomain`, or set {CHIEF}."
            )
        return f"{job}-0{dot}{service}"
