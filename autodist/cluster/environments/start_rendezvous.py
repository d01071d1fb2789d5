"""Starts the rendezvous when a script of a given cluster creates its AutoDist; all but the chief become followers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from autodist.cluster.environments.launcher_env import RENDEZVOUS_DONE, GivenCluster
from autodist.cluster.environments.launchers import find, require
from autodist.cluster.environments.slurm import allocated_nodes
from autodist.cluster.script import Script, require_script
from autodist.cluster.transport import Channel
from autodist.errors import ClusterError, ResourceSpecError
from autodist.resources import ResourceSpec

if TYPE_CHECKING:
    from autodist.cluster.environments.elastic_rendezvous import ElasticRendezvous
    from autodist.cluster.environments.quorum import Quorum
    from autodist.cluster.environments.rendezvous import Rendezvous

_log = logging.getLogger("autodist.cluster")

_completed: list[Rendezvous] = []
"""The completed rendezvous of this process, if any."""


def join_rendezvous(
    spec: ResourceSpec, replicas: int | None, count_gpus: Callable[[], int], quorum: Quorum | None = None
) -> ResourceSpec:
    """Waits for all processes of the cluster and returns the machines; does not return in other processes.

    The other processes become followers, which start the script again under a guard.

    Args:
        spec: the user's other settings.
        replicas: replicas of each worker; None for one per GPU, or one on its CPU.
        count_gpus: returns the number of GPUs that TensorFlow sees on this machine.
        quorum: of an elastic run, the part of the processes that suffices; None: all start together.

    Raises:
        ResourceSpecError: the environment describes no cluster or an invalid one, or there is no secret.
        ClusterError: a process has not joined or cannot take part, or the chief's script started this process.
    """
    if _completed and _completed[-1].is_of_this_process:  # the script has created another AutoDist
        machines = _completed[-1].machines
        return spec.with_nodes(machines.nodes, machines.allotments)
    if RENDEZVOUS_DONE in os.environ:
        raise ClusterError(
            "AutoDist is used in a process that the chief's script started, and the processes of the given cluster "
            'have already joined. Put the part of the script that trains under `if __name__ == "__main__":`, so that '
            "processes which only import the script (as those of `multiprocessing` do) skip it."
        )
    # Imported here: most processes that import AutoDist need no rendezvous.
    from autodist.cluster.environments.follower import FollowerOrder, follow

    given = require(os.environ)
    if given.index:
        follow(FollowerOrder(given, Script.of_this_process(), spec.join_timeout))
    if given.count != 1:
        require_script()  # now: the others would wait for this process to fail
    if quorum is not None:
        _require_may_be_elastic(given, quorum)
    met = meet(given, spec, replicas, count_gpus, os.environ, quorum)
    os.environ[RENDEZVOUS_DONE] = "yes"
    return met


def meet(
    given: GivenCluster,
    spec: ResourceSpec,
    replicas: int | None,
    count_gpus: Callable[[], int],
    environment: MutableMapping[str, str],
    quorum: Quorum | None = None,
) -> ResourceSpec:
    """On the chief, waits for all processes of the cluster and returns the machines.

    Args:
        given: the cluster of this process.
        spec: the user's other settings.
        replicas: as for `join_rendezvous`.
        count_gpus: as for `join_rendezvous`.
        environment: environment variables of this process; AUTODIST_SECRET is removed.
        quorum: as for `join_rendezvous`.

    Raises:
        ResourceSpecError: there is no secret.
        ClusterError: a process has not joined or cannot take part.
    """
    from autodist.cluster.environments.local_facts import hello_of
    from autodist.cluster.environments.rendezvous import Rendezvous

    if quorum is None:
        rendezvous = Rendezvous(given, spec, environment)
    else:
        from autodist.cluster.environments.elastic_rendezvous import ElasticRendezvous

        rendezvous = ElasticRendezvous(given, spec, environment, quorum)
    machines = rendezvous.wait(hello_of(given, environment, count_gpus), replicas)
    _completed.append(rendezvous)
    return spec.with_nodes(machines.nodes, machines.allotments)


def _require_may_be_elastic(given: GivenCluster, quorum: Quorum) -> None:
    """Checks that some of the processes of a cluster may start without the others.

    Raises:
        ResourceSpecError: more processes are needed than may come, or the environment names all their servers.
    """
    if given.addresses:
        raise ResourceSpecError(
            f"min_nodes is {quorum.least}, but {given.form} names the address of each process's server, so that all "
            "have to start together. Leave it out, or start the processes by `autodist run --join HOST:PORT --index K "
            "--nodes MIN:MAX`."
        )
    if given.count is not None and quorum.least > given.count:
        raise ResourceSpecError(
            f"min_nodes is {quorum.least}, more than the number of processes, {given.count} ({given.form}); allowed: 1 "
            f"to {given.count}."
        )


def elastic_rendezvous() -> ElasticRendezvous | None:
    """Returns the completed rendezvous of an elastic run; None in other processes than its chief."""
    from autodist.cluster.environments.elastic_rendezvous import ElasticRendezvous

    last = _completed[-1] if _completed else None
    return last if isinstance(last, ElasticRendezvous) and last.is_of_this_process else None


def leave_rendezvous(reason: str) -> None:
    """On the chief, ends the rendezvous: the process goes on.

    Args:
        reason: sent to the other processes, if the run was not started.
    """
    while _completed:
        _completed.pop().leave(reason)


def channels_of_followers() -> tuple[Channel, ...]:
    """Returns the channels to the agents of all other workers of the given cluster, in their order; chief only."""
    return _completed[-1].channels


def warn_if_alone(machines: int) -> None:
    """Warns if a scheduler has started several processes or allocated more machines, and this run does not use them.

    Args:
        machines: number of machines that the run uses.
    """
    allocated = allocated_nodes(os.environ)
    if allocated > machines:
        _log.warning(
            "SLURM has allocated %d machines to this job, and this run uses %d: outside of `srun` a script runs on the "
            "first machine only. Start it by `srun autodist run` to train on all of them.", allocated, machines,
        )  # fmt: skip
    try:
        given = find(os.environ)
    except ResourceSpecError:
        return  # the run does not use the malformed variable
    if given is not None and (given.count or 2) > 1 and RENDEZVOUS_DONE not in os.environ:
        _log.warning(
            "this is process %d%s (%s), and it trains without the others: set `nodes: given` in the YAML, start it by "
            "`autodist run`, or call `autodist.join` in a function, to train together.",
            given.index, f" of {given.count}" if given.count else "", given.form,
        )  # fmt: skip
