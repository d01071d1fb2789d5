"""Checks one machine while a run trains on others: as before a start, but quietly, and without starting a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autodist.cluster.addresses import check_reach
from autodist.cluster.agent import find_own_facts
from autodist.cluster.preflight import compared_packages, faults
from autodist.cluster.protocol import Inspect, Lost, Stop
from autodist.cluster.script import Script
from autodist.cluster.worker_connection import WorkerGroup
from autodist.errors import ClusterError, MachinesAwayError
from autodist.resources import Node, ResourceSpec
from autodist.waits import Condition


def find_faults(
    spec: ResourceSpec, node: Node, script: Script, environment: Mapping[str, str], is_stopped: Callable[[], bool]
) -> tuple[str, ...] | None:
    """Returns the faults of a machine, each with its fix; () if a run can use it, None if it does not answer.

    The machine receives the folder under `sync` first. Its agents end before the function returns.

    Args:
        spec: all machines that the run would have.
        node: the machine.
        script: the script that its workers would run.
        environment: environment variables of programs started on this machine.
        is_stopped: called periodically; returns True to cancel the check.
    """
    try:
        check_reach([other.address for other in spec.nodes])
        if spec.sync is not None and spec.ssh_group(node) is not None:
            from autodist.cluster.file_sync import sync_to  # imported here, so that paramiko is loaded only if needed

            sync_to(spec, [node], is_stopped, logs_unchanged=False)
    except MachinesAwayError:
        return None
    except ClusterError as error:
        return (str(error),)
    return _find_faults_of_agents(spec, node, script, environment, is_stopped)


def _find_faults_of_agents(
    spec: ResourceSpec, node: Node, script: Script, environment: Mapping[str, str], is_stopped: Callable[[], bool]
) -> tuple[str, ...] | None:
    workers = [worker for worker in spec.workers if worker.node == node]
    group = WorkerGroup(spec, Condition(), lambda ended: None, lambda leaving: None, workers, logs=False)
    hosts = tuple(other.address for other in spec.nodes)
    request = Inspect(script.file, script.directory, None, compared_packages(), hosts, spec.firewall == "auto")
    own = replace(find_own_facts(request), digest=script.digest)
    try:
        for _ in group.open(environment):
            continue
        group.request_facts([replace(request, port=worker.port) for worker in workers])
        answers = group.wait_for_facts(is_stopped).values()
        group.send(Stop())
    finally:
        group.close(limit=0 if is_stopped() else None)
    if any(isinstance(answer, Lost) and answer.is_away for answer in answers):
        return None
    return tuple(dict.fromkeys(fault for answer in answers for fault in faults(answer, own, script.name)))
