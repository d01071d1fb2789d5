"""Which form of environment this process was started in."""

from __future__ import annotations

import logging

from autodist.cluster.environments.kubernetes import RANK as POD
from autodist.cluster.environments.kubernetes import Kubernetes
from autodist.cluster.environments.launcher_env import CHIEF, INDEX, WORKERS, Environment, Given, LauncherEnv
from autodist.cluster.environments.manual import Manual
from autodist.cluster.environments.open_mpi import OpenMPI
from autodist.cluster.environments.pmi import PMI
from autodist.cluster.environments.slurm import Slurm
from autodist.cluster.environments.tf_config import TFConfig
from autodist.errors import ResourceSpecError

_log = logging.getLogger("autodist.cluster")

FORMS: tuple[LauncherEnv, ...] = (Manual(), TFConfig(), OpenMPI(), PMI(), Slurm(), Kubernetes())
"""In the order in which they win: what was said on purpose, then who started this process itself, who may have been
started by the next."""


def find(environment: Environment) -> Given | None:
    """What the environment says of a cluster; None if it is of none of the forms.

    Raises:
        ResourceSpecError: a variable is missing or malformed; names it.
    """
    there = [form for form in FORMS if form.is_there(environment)]
    if not there:
        return None
    given = there[0].read(environment)
    if len(there) > 1:
        others = " and ".join(form.name for form in there[1:])
        _log.info("the environment has %s and %s: %s counts", there[0].name, others, there[0].name)
    return given


def require(environment: Environment) -> Given:
    """The same where there has to be one.

    Raises:
        ResourceSpecError: there is none, besides what `find` raises.
    """
    given = find(environment)
    if given is not None:
        return given
    if POD in environment:
        raise ResourceSpecError(
            f"the environment variable {WORKERS} is missing; set it to the Job's `completions`, since no pod is told."
        )
    names = ", ".join(form.name for form in FORMS[1:])
    raise ResourceSpecError(
        f"nodes: given, and this process's environment is of none of the forms {names} (of several processes each). "
        f"Start it by such a scheduler, by `autodist run --join HOST:PORT --index K`, or with {INDEX}, {WORKERS} and "
        f"{CHIEF}."
    )
