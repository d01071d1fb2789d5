"""`autodist plan`: shows the plans of strategies for a script's training steps; nothing is started or trained."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import output, require_writable, write_file
from autodist.cli.options import Arguments, Cluster, IsModule, Replicas, Script, Strategies, Traceback, Workers
from autodist.cli.plans import Plans
from autodist.cli.script import Target
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides
from autodist.tf_compat.importing import importing_tensorflow


def plan(
    script: Script,
    arguments: Arguments = None,
    is_module: IsModule = False,
    cluster: Cluster = None,
    workers: Workers = None,
    replicas: Replicas = None,
    strategies: Strategies = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the plans as JSON, for `autodist diff`.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML page with plots to this file; it works offline.", dir_okay=False)
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option(min=1, help="End the script at this call of a training step; earlier calls return ones."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Show the cost of each variable under a strategy. Nothing is started, nothing is trained.

    The script runs on one device up to its first training step, which is captured. It continues while another of its
    `@ad.function`s that computes gradients has not been called; its steps then return ones. "sends" and "receives" are
    the bytes of gradients and variable values per step, "holds" is the size of variables with the optimizer's slots.
    FLOPs are TensorFlow's count for a worker's part of the first batch. For a pipeline, the plan shows the memory, the
    FLOPs and the transfers of its stages. The script's output goes to standard error.

    Examples:

    * `autodist plan train.py --epochs 1`

    * `autodist plan --workers 4 --strategy Parallax train.py`

    * `autodist plan --cluster cluster.yml --strategy PS --strategy AllReduce --html plan.html train.py`

    * `autodist plan --json --strategy PS train.py > ps.json`
    """
    if html is not None:
        require_writable(html)
    target = Target(script, is_module, arguments or [])
    overrides = CliOverrides(None if cluster is None else str(cluster), workers, replicas)
    plans, _ = make_plans_quietly(target, overrides, strategies or [], calls)
    if html is not None:
        from autodist.cli.plan_page import page_of

        write_file(html, page_of(plans))
    if as_json:
        typer.echo(plans.model_dump_json(indent=2))
    else:
        show(plans)


def show(plans: Plans) -> None:
    """Prints plans at the width of the terminal."""
    from autodist.cli.plan_tables import tables_of

    console = output()
    for of_step in plans.by_step.values():
        for table in tables_of(of_step, console.width):
            console.print(table)
    console.print(plans.note)


def make_plans_quietly(
    target: Target, overrides: CliOverrides, strategies: Sequence[str], calls: int | None = None
) -> tuple[Plans, ResourceSpec]:
    """Calls `make_plans`, with the script's standard output redirected to standard error."""
    target.require()  # before TensorFlow is imported, which takes seconds
    with importing_tensorflow():
        from autodist.cli.planning import make_plans
    with contextlib.redirect_stdout(sys.stderr):
        return make_plans(target, overrides, strategies, calls)
