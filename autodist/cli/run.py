"""`autodist run`: runs a script on the machines and under the strategy of the command line."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.table import Table

from autodist.cli.command_errors import UsageError, output
from autodist.cli.options import (
    Arguments,
    Cluster,
    Index,
    IsModule,
    Join,
    MaxRestarts,
    Nodes,
    Replicas,
    Script,
    Strategy,
    Traceback,
    Workers,
)
from autodist.cli.plan import make_plans_quietly, show
from autodist.cli.script import Target
from autodist.cluster.environments.follower import FollowerOrder, follow
from autodist.cluster.environments.launcher_env import (
    CHIEF,
    INDEX,
    MAX_WORKERS,
    WORKERS,
    GivenCluster,
    host_and_port_of,
)
from autodist.cluster.environments.launchers import find, require
from autodist.cluster.script import Script as ScriptToRun
from autodist.logs.tables import text_table
from autodist.resources import ResourceSpec, Timeouts, Worker
from autodist.runs.cli_overrides import CliOverrides

_LAUNCHED = ("-m", "autodist.cli.launched")
"""The arguments, before those of the script, of the Python process that runs the script as this command does."""


def run(
    script: Script,
    arguments: Arguments = None,
    is_module: IsModule = False,
    cluster: Cluster = None,
    strategy: Strategy = None,
    workers: Workers = None,
    replicas: Replicas = None,
    join: Join = None,
    index: Index = None,
    nodes: Nodes = None,
    max_restarts: MaxRestarts = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the processes that would be started, and the plan; start nothing.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Run a script on the machines of the command line. The script itself needs only `AutoDist()`.

    Options that are left out keep the script's values. The script runs in this process: signals, exit status, standard
    input and terminal are as with `python SCRIPT`. Exit status 2: the script creates no AutoDist, or two, or ends
    before a step of it. An error of AutoDist is printed with the script's line, and the exit status is 1.

    A scheduler may start several of these processes (SLURM, Open MPI, PMI, an indexed Job of Kubernetes, TF_CONFIG). If
    the options name no machines, the processes then train together, with their indices from the environment.

    Examples:

    * `autodist run --workers 2 train.py --epochs 3`

    * `autodist run --cluster cluster.yml --strategy Parallax train.py`

    * `srun autodist run train.py`

    * `autodist run --join 10.0.0.1:15000 --index 1 train.py`

    * `autodist run --join 10.0.0.1:15000 --index 0 --nodes 2:8 --max-restarts 3 train.py`

    * `autodist run --cluster cluster.yml --dry-run -m package.train --epochs 3`
    """
    target = Target(script, is_module, arguments or [])
    target.require()
    file = None if cluster is None else os.path.abspath(cluster)
    if join is None:
        CliOverrides(file, workers)  # checks the options before the file is read
    spec = None if file is None else ResourceSpec.from_file(file)  # fails early, before TensorFlow is imported
    limits_of_count = None if nodes is None else NodeRange.parse(nodes)
    given = find_given(spec, join, index, workers, limits_of_count)
    if given is not None:
        _require_no_dry_run(dry_run)
        overrides = CliOverrides(
            file, strategy=strategy, given=True, replicas=replicas, max_restarts=max_restarts,
            min_nodes=None if limits_of_count is None else limits_of_count.least,
        )  # fmt: skip
        limits = spec or Timeouts()
        if given.index:
            follow(FollowerOrder(given, _script(target), limits.join_timeout))
    else:
        overrides = CliOverrides(file, workers, replicas, strategy, max_restarts=max_restarts)
    if dry_run:
        _show_what_would_run(target, overrides)
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    variables = replace(overrides, traceback=traceback).environment()
    os.execve(sys.executable, [sys.executable, *_LAUNCHED, *target.words], os.environ | variables)


@dataclass(frozen=True)
class NodeRange:
    """The numbers of processes with which a run may train: `--nodes MIN:MAX`."""

    least: int
    most: int

    @staticmethod
    def parse(text: str) -> NodeRange:
        """Parses "2:8"; a single number stands for both.

        Raises:
            UsageError: the text has another form, or the first number is the larger one.
        """
        parts = text.split(":")
        is_number = all(part.isascii() and part.isdecimal() and 0 < len(part) < 7 for part in parts)
        if len(parts) > 2 or not is_number or not 1 <= int(parts[0]) <= int(parts[-1]) <= MAX_WORKERS:
            raise UsageError(
                f"--nodes is {text[:60]!r}; allowed: MIN:MAX, two whole numbers from 1 to {MAX_WORKERS} of which the "
                "first is not the larger one, such as 2:8."
            )
        return NodeRange(int(parts[0]), int(parts[-1]))


def find_given(
    spec: ResourceSpec | None,
    join: str | None,
    index: int | None,
    workers: int | None,
    nodes: NodeRange | None = None,
) -> GivenCluster | None:
    """Returns the role of this process in a `nodes: given` cluster; None if it has none or its options name machines.

    Raises:
        UsageError: the options contradict one another.
        ResourceSpecError: the environment is malformed.
    """
    if nodes is not None and (workers is not None or (spec is not None and not spec.is_given)):
        other = "--workers" if workers is not None else "the YAML of --cluster"
        raise UsageError(f"--nodes and {other} both set the number of workers; leave out one of them.")
    if join is not None or index is not None:
        _join_by_hand(spec, join, index, workers if nodes is None else nodes.most)
    elif (not spec.is_given) if spec is not None else workers is not None:
        return None
    given = require(os.environ) if spec is not None or nodes is not None else find(os.environ)
    if nodes is not None and given is not None and given.count not in (None, nodes.most):
        raise UsageError(
            f"--nodes {nodes.least}:{nodes.most}, but there are {given.count} processes ({given.form}); allowed as the "
            f"second number: {given.count}."
        )
    return None if given is None or (given.count == 1 and spec is None) else given


def _join_by_hand(spec: ResourceSpec | None, join: str | None, index: int | None, workers: int | None) -> None:
    """Stores the options in this process's environment, as if a scheduler had set them."""
    if join is None or index is None:
        raise UsageError("--join and --index belong together: the chief's address, and the index of this process.")
    if spec is not None and not spec.is_given:
        raise UsageError("--join is for processes that are started by hand, but the YAML of --cluster names machines.")
    if index == 0 and workers is None:
        raise UsageError("the chief, --index 0, needs the number of processes: add --workers, or --nodes MIN:MAX.")
    host_and_port_of(join, "--join", None)
    os.environ |= {CHIEF: join, INDEX: str(index)}
    if workers is not None:
        os.environ[WORKERS] = str(workers)


def _require_no_dry_run(dry_run: bool) -> None:
    if dry_run:
        raise UsageError(
            "--dry-run starts nothing, and the machines of `nodes: given` are not known until its processes have "
            "joined; name the machines with only --cluster or --workers."
        )


def _script(target: Target) -> ScriptToRun:
    """Returns the script in the form that a follower runs."""
    file = None if target.is_module else os.path.abspath(target.name)
    return ScriptToRun((*_LAUNCHED, *target.words), os.getcwd(), file)


def _show_what_would_run(target: Target, overrides: CliOverrides) -> None:
    strategies = [] if overrides.strategy is None else [overrides.strategy]
    plans, spec = make_plans_quietly(
        target, CliOverrides(overrides.cluster, overrides.workers, overrides.replicas), strategies
    )
    console = output()
    console.print(f"{shlex.join(['python', *target.words])} would run as", soft_wrap=True)
    console.print(_processes(spec))
    show(plans)


def _processes(spec: ResourceSpec) -> Table:
    """Returns a table of the workers' processes."""
    rows = []
    for worker in spec.workers:
        devices = ", ".join(worker.devices) if worker.has_replicas else "none: it owns variables"
        port = "a free one" if worker.port is None else str(worker.port)
        rows.append([worker.name, devices, _start_of(spec, worker), port if len(spec.workers) > 1 else "none"])
    return text_table("", ["worker", "replicas on", "started", "port"], rows)


def _start_of(spec: ResourceSpec, worker: Worker) -> str:
    if worker.index == 0:
        return "in this process"
    group = spec.ssh_group(worker.node)
    if group is None:
        return "as a process here"
    named = f", group {worker.node.ssh_config}" if worker.node.ssh_config else ""
    return f"over SSH at {worker.node.address}{named}"
