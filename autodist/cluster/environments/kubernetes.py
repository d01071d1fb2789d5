"""Launcher environment of Kubernetes: an indexed Job or a JobSet, with one pod per index and a headless service."""

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
    chief_in,
    index_and_count,
)
from autodist.errors import ResourceSpecError

RANK = "JOB_COMPLETION_INDEX"


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
        return (
            RANK in environment and WORKERS in environment
        )  # without WORKERS, the pods of a Job do not belong together

    def read(self, environment: Environment) -> Given:
        index, count = index_and_count(environment, RANK, WORKERS)
        return Given(self.name, index, count, *(chief_in(environment) or (self._chief(index),)))

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
