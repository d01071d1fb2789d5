"""The early launch of a restart: the other workers start with the chief's script, not with its AutoDist.

In a first start, the machines are known once the script creates its AutoDist, which is after its imports. In a restart
they are known before. The other workers then import, read and build their models at the same time as the chief.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from autodist.cluster.script import Script
from autodist.resources import ResourceSpec
from autodist.runs.worker_launch import WorkerLaunch

VARIABLE = "AUTODIST_EARLY_LAUNCH"
"""Environment variable with the descriptor of an inherited file; empty: no early launch. The file is in memory, since
the machines' settings may hold secrets, which other programs can read in an environment.
"""


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
    entries = asdict(script)
    del entries["pickled_code"], entries["function"]
    descriptor = os.memfd_create("autodist-early-launch")
    os.set_inheritable(descriptor, True)
    with open(descriptor, "w", closefd=False) as file:
        json.dump({"spec": spec.to_payload(), "script": entries}, file)
    return {VARIABLE: str(descriptor)}


def no_early_launch() -> dict[str, str]:
    """Returns the environment variable for a process without an early launch, which an earlier start may have had."""
    return {VARIABLE: ""}


def launch_early() -> None:
    """Starts the other workers in the background, if this process was re-executed with `environment_of`."""
    descriptor = os.environ.pop(VARIABLE, "")
    if not descriptor:
        return
    with open(int(descriptor)) as file:
        file.seek(0)
        content = json.load(file)
    entries = content["script"]
    entries["arguments"] = tuple(entries["arguments"])
    entries["environment"] = tuple((name, value) for name, value in entries["environment"])
    WorkerLaunch.begin_early(ResourceSpec.from_payload(content["spec"]), Script(**entries))
