"""The early launch of a restart: the other workers start with the chief's script, not with its AutoDist.

In a first start, the machines are known once the script creates its AutoDist, which is after its imports. In a restart
they are known before. The other workers then import, read and build their models at the same time as the chief.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from autodist.cluster.script import Script
from autodist.json_record import JSONRecord
from autodist.resources import ResourceSpec
from autodist.runs.worker_launch import WorkerLaunch

VARIABLE = "AUTODIST_EARLY_LAUNCH"
"""Environment variable with the descriptor of an inherited file; empty: no early launch. The file is in memory, since
the machines' settings may hold secrets, which other programs can read in an environment.
"""


@dataclass(frozen=True)
class _Order(JSONRecord):
    """The machines, from `ResourceSpec.to_payload`, and the script that the workers run."""

    spec: str
    script: Script


def environment_of(spec: ResourceSpec, script: Script | None) -> dict[str, str]:
    """Returns the environment variable that makes a re-executed process start the other workers early.

    They are not started early under a scheduler, or if the script is in no file, or if a folder is copied to their
    machines (`sync`): the chief's script may change its files before it creates its AutoDist.

    Args:
        spec: the machines.
        script: the script that the workers run; None if no workers have been started.
    """
    if script is None or spec.is_given or spec.sync is not None or script.pickled_code or script.function:
        return no_early_launch()
    descriptor = os.memfd_create("autodist-early-launch")
    os.set_inheritable(descriptor, True)
    os.write(descriptor, _Order(spec.to_payload(), script).encode())
    return {VARIABLE: str(descriptor)}


def no_early_launch() -> dict[str, str]:
    """Returns the environment variable for a process without an early launch, which an earlier start may have had."""
    return {VARIABLE: ""}


def launch_early() -> None:
    """Starts the other workers in the background, if this process was re-executed with `environment_of`."""
    descriptor = os.environ.pop(VARIABLE, "")
    if not descriptor:
        return
    with open(int(descriptor), "rb") as file:
        file.seek(0)
        order = _Order.decode(file.read())
    WorkerLaunch.begin_early(ResourceSpec.from_payload(order.spec), order.script)
