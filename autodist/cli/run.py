"""`autodist run`: runs a script on the machines, and under the strategy, that the command line names."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from autodist.asked import Asked
from autodist.cli.options import Arguments, Cluster, IsModule, Replicas, Script, Strategy, Traceback, Workers
from autodist.cli.plan import make_plans_quietly, show
from autodist.cli.plans import Plans
from autodist.cli.script import Target
from autodist.cli.telling import output
from autodist.resources import ResourceSpec, Worker


def run(
    script: Script,
    arguments: Arguments = None,
    is_module: IsModule = False,
    cluster: Cluster = None,
    strategy: Strategy = None,
    workers: Workers = None,
    replicas: Replicas = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be started where, and the plan; start nothing.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Run a script whose code says no more than `AutoDist()`.

    What is not given here is as the script says. The script runs in this process: signals, exit status, standard input
    and terminal are as with `python SCRIPT`. A script that makes no AutoDist, or two, or ends before a step of it, ends
    with status 2.

    Examples:

    * `autodist run --workers 2 train.py --epochs 3`

    * `autodist run --cluster cluster.yml --strategy Parallax train.py`

    * `autodist run --cluster cluster.yml --dry-run -m package.train --epochs 3`
    """
    target = Target(script, is_module, arguments or [])
    target.require()
    asked = Asked(None if cluster is None else os.path.abspath(cluster), workers, replicas, strategy)
    if asked.cluster is not None:
        ResourceSpec.from_file(asked.cluster)  # told here, before TensorFlow is imported
    if dry_run:
        _show_what_would_run(target, asked)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    words = ["-m", script] if is_module else [script]
    command = [sys.executable, "-m", "autodist.cli.launched", *words, *target.arguments]
    os.execve(sys.executable, command, os.environ | asked.environment())


def _show_what_would_run(target: Target, asked: Asked) -> None:
    strategies = [] if asked.strategy is None else [asked.strategy]
    plans, spec = make_plans_quietly(target, Asked(asked.cluster, asked.workers, asked.replicas), strategies)
    console = output()
    command = ["python", *(["-m"] if target.is_module else []), target.name, *target.arguments]
    console.print(f"{shlex.join(command)} would run as", soft_wrap=True)
    console.print(_processes(spec))
    show(Plans(script=target.name, plans=plans))


def _processes(spec: ResourceSpec) -> Table:
    """Each worker's process."""
    table = Table()
    for head in ("worker", "replicas on", "started", "port"):
        table.add_column(Text(head), overflow="fold")
    for worker in spec.workers:
        devices = ", ".join(worker.devices) if worker.has_replicas else "none: it owns variables"
        port = "a free one" if worker.port is None else str(worker.port)
        table.add_row(*map(Text, [worker.name, devices, _how(spec, worker), port if len(spec.workers) > 1 else "none"]))
    return table


def _how(spec: ResourceSpec, worker: Worker) -> str:
    if worker.index == 0:
        return "in this process"
    group = spec.ssh_group(worker.node)
    if group is None:
        return "as a process here"
    named = f", group {worker.node.ssh_config}" if worker.node.ssh_config else ""
    return f"over SSH at {worker.node.address}{named}"
