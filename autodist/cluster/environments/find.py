"""Detects the launcher environment in which this process was started."""

from __future__ import annotations

import logging

from autodist.cluster.environments.kubernetes import RANK as POD
from autodist.cluster.environments.kubernetes import Kubernetes
from autodist.cluster.environments.launcher_env import CHIEF, INDEX, WORKERS, Environment, Given, LauncherEnv
from autodist.cluster.environments.manual import Manual
from autodist.cluster.environments.pmi import PMI, OpenMPI
from autodist.cluster.environments.slurm import Slurm
from autodist.cluster.environments.tf_config import TFConfig
from autodist.errors import ResourceSpecError

_log = logging.getLogger("autodist.cluster")

LAUNCHERS: tuple[LauncherEnv, ...] = (Manual(), TFConfig(), OpenMPI(), PMI(), Slurm(), Kubernetes())
"""In order of precedence: explicit settings, then the launcher of this process, then the launchers that may have
started that launcher."""


def find(environment: Environment) -> Given | None:
    """Reads the cluster from the environment; returns None if there is no launcher environment.

    Raises:
        ResourceSpecError: names the variable that is missing or malformed.
    """
    present = [form for form in LAUNCHERS if form.is_present(environment)]
    if not present:
        return None
    given = present[0].read(environment)
    if len(present) > 1:
        others = " and ".join(form.name for form in present[1:])
        _log.info("the environment has %s and %s: %s takes precedence", present[0].name, others, present[0].name)
    return given


def require(environment: Environment) -> Given:
    """Same as `find`, for a run that requires a launcher environment.

    Raises:
        ResourceSpecError: there is none, or `find` raises it.
    """
    given = find(environment)
    if given is not None:
        return given
    if POD in environment:
        raise ResourceSpecError(
            f"the environment variable {WORKERS} is missing; set it to the Job's `completions`, which Kubernetes does "
            "not pass to the pods."
        )
    names = ", ".join(form.name for form in LAUNCHERS[1:])
    raise ResourceSpecError(
        f"nodes: given, but this process's environment is none of {names} (with several processes). "
        f"Start it by such a scheduler, by `autodist run --join HOST:PORT --index K`, or with {INDEX}, {WORKERS} and "
        f"{CHIEF}."
    )
