"""`autodist check`: checks all machines of a cluster and reports all faults at once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import UsageError, output
from autodist.cli.options import IsModule, Traceback
from autodist.cli.script import Target
from autodist.resources import ResourceSpec

FAULTY = 1
"""Exit status if a machine or a link has a fault."""


def check(
    cluster: Annotated[
        Path, typer.Argument(metavar="CLUSTER", help="YAML file of the machines.", exists=True, dir_okay=False)
    ],
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The training script; with -m, a module.")
    ] = None,
    is_module: IsModule = False,
    links: Annotated[
        bool, typer.Option("--links/--no-links", help="Measure round trip and bandwidth between each pair of machines.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Time limit for measuring pairs; pairs left out are listed.")
    ] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as JSON.")] = False,
    traceback: Traceback = False,
) -> None:
    """Check that every machine of a cluster is ready to train. Exit status 1: a machine or a link has a fault.

    For each machine: reachability and login; versions of Python, TensorFlow, Keras and AutoDist; the script (the same
    content at the same path); the ports of its workers, from every machine; its clock, cores, memory, disk and GPUs.
    For each pair: round trip and bandwidth through TensorFlow's own transport, one pair at a time. The report also
    lists the ports that are open while a run trains, with the firewall rules that close them. The check leaves nothing
    on any machine.

    Examples:

    * `autodist check cluster.yml train.py`

    * `autodist check --no-links cluster.yml -m package.train`

    * `autodist check --json cluster.yml > check.json`
    """
    spec = ResourceSpec.from_file(cluster)
    if spec.is_given:
        raise UsageError("the machines of `nodes: given` are not known until a scheduler has started its processes.")
    file = None if script is None else _file_of(Target(script, is_module, []))
    if file is not None and spec.sync is not None and file.startswith(os.path.join(spec.sync.folder, "")):
        script = file = None  # a run copies it to the machines
    from autodist.cli.checking.check_machines import check_all_machines
    from autodist.cli.checking.links import Measured, measure
    from autodist.cli.checking.report import report_of, usable
    from autodist.cli.checking.tables import tables_of

    with _status() as show:
        machines = check_all_machines(spec, file, None if script is None else os.getcwd(), show)
        ready = usable(machines, file)
        measured = Measured()
        if links:
            show("measuring the links between machines")
            measured = measure(spec, ready, seconds)
    report = report_of(spec, machines, file, measured)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        console = output()
        for part in tables_of(report):
            console.print(part, soft_wrap=isinstance(part, str))
    if report.has_faults:
        raise typer.Exit(FAULTY)


def _file_of(target: Target) -> str | None:
    """Returns the script's file; None for an installed module, which each machine has from its packages."""
    target.require()
    if not target.is_module:
        return os.path.abspath(target.name)
    with target.as_main():
        found = importlib.util.find_spec(target.name)
    origin = None if found is None else found.origin
    return origin if origin and origin.startswith(os.getcwd() + os.sep) else None


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Shows the current activity on a terminal."""
    import rich.console

    with rich.console.Console(stderr=True).status("autodist: checking …") as status:
        yield lambda activity: status.update(f"autodist: {activity} …")
