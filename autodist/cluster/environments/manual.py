"""Launcher environment of AutoDist's own variables, which `autodist run --join HOST:PORT --index K` sets."""

from __future__ import annotations

from typing import ClassVar

from autodist.cluster.environments.launcher_env import (
    CHIEF,
    INDEX,
    MOST_WORKERS,
    WORKERS,
    Environment,
    Given,
    LauncherEnv,
    chief_in,
    index_and_count,
    number_of,
    text_of,
)


class Manual(LauncherEnv):
    """AUTODIST_INDEX=1 AUTODIST_WORKERS=3 AUTODIST_CHIEF=node1:15000; only the chief needs AUTODIST_WORKERS."""

    name: ClassVar[str] = "by hand"

    def is_present(self, environment: Environment) -> bool:
        return INDEX in environment

    def read(self, environment: Environment) -> Given:
        index = number_of(environment, INDEX, "the number of this process, counted from 0", 0, MOST_WORKERS)
        count = None
        if index == 0 or WORKERS in environment:
            index, count = index_and_count(environment, INDEX, WORKERS)
        text_of(environment, CHIEF, "HOST:PORT, where the process with index 0 runs")
        chief = chief_in(environment)
        assert chief is not None, "the variable is set"
        return Given(self.name, index, count, *chief)
