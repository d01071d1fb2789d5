"""Where a script of a given cluster makes its AutoDist: the chief meets the others, and these become followers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from autodist.cluster.environments.find import find, require
from autodist.cluster.environments.launcher_env import MET
from autodist.cluster.environments.slurm import allocated_nodes
from autodist.cluster.script import Script
from autodist.cluster.transport import Channel
from autodist.errors import ClusterError, ResourceSpecError
from autodist.resources import ResourceSpec

if TYPE_CHECKING:
    from autodist.cluster.environments.rendezvous import Rendezvous

_log = logging.getLogger("autodist.cluster")

_met: list[Rendezvous] = []
"""The meeting of this process."""


def meet(spec: ResourceSpec, replicas: int | None, count_gpus: Callable[[], int]) -> ResourceSpec:
    """The machines, once all processes of the cluster have met; does not return on others than the chief.

    Those begin anew, as followers that start the script a second time, under guard.

    Args:
        spec: what the user says besides.
        replicas: of each worker; None: one for each of its GPUs, or one on its CPU.
        count_gpus: how many GPUs TensorFlow sees here.

    Raises:
        ResourceSpecError: the environment tells of no cluster, or wrongly; or there is no secret.
        ClusterError: a process has not come, or cannot take part; or this process was started by the chief's script.
    """
    if _met and _met[-1].is_of_this_process:  # the script has made another AutoDist
        machines = _met[-1].machines
        return spec.with_nodes(machines.nodes, machines.allotments)
    if MET in os.environ:
        raise ClusterError(
            "AutoDist is used in a process that the chief's script started, and those of the given cluster have "
            'met already. Put the part of the script that trains under `if __name__ == "__main__":`, so that those '
            "which only import the script (as `multiprocessing` makes them) leave it out."
        )
    # Here: each process that imports AutoDist would make ready how processes meet, and few of them do.
    from autodist.cluster.environments.follower import FollowerOrder, follow
    from autodist.cluster.environments.local_facts import hello_of
    from autodist.cluster.environments.rendezvous import Rendezvous

    given = require(os.environ)
    if given.index:
        follow(FollowerOrder(given, Script.of_this_process(), spec.join_timeout))
    meeting = Rendezvous(given, spec, os.environ)
    machines = meeting.wait(hello_of(given, os.environ, count_gpus), replicas)
    os.environ[MET] = "yes"
    _met.append(meeting)
    return spec.with_nodes(machines.nodes, machines.allotments)


def channels_of_followers() -> tuple[Channel, ...]:
    """To the agents of all other workers of the given cluster whose chief this process is, in their order."""
    return _met[-1].channels


def warn_if_alone(machines: int) -> None:
    """Warns if a scheduler has started several processes or allocated more machines, and this run does not use them.

    Args:
        machines: number of machines that the run uses.
    """
    allocated = allocated_nodes(os.environ)
    if allocated > machines:
        _log.warning(
            "SLURM has allocated %d machines to this job, and this run uses %d: outside of `srun` a script runs on the "
            "first machine alone. Start it by `srun autodist run` to train on all of them.", allocated, machines,
        )  # fmt: skip
    try:
        given = find(os.environ)
    except ResourceSpecError:
        return  # a variable that nobody has asked for
    if given is not None and (given.count or 2) > 1 and MET not in os.environ:
        _log.warning(
            "this is process %d%s (%s), and it trains without the others: say `nodes: given` in the YAML, or start "
            "it by `autodist run`, and they train together.",
            given.index, f" of {given.count}" if given.count else "", given.form,
        )  # fmt: skip
