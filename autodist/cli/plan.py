"""`autodist plan`: what strategies would make of a script's training step; nothing is started or trained."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autodist.asked import Asked
from autodist.cli.options import Arguments, Cluster, IsModule, Replicas, Script, Strategies, Traceback, Workers
from autodist.cli.plans import PlannedStrategy, Plans
from autodist.cli.script import Target
from autodist.cli.telling import output, require_writable, write_file
from autodist.importing import importing_tensorflow
from autodist.resources import ResourceSpec


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
        Path | None, typer.Option(help="Write a page with plots to this file; it needs no network.", dir_okay=False)
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Show what each variable costs under a strategy. Nothing is started, nothing is trained.

    The script runs on one device up to its first training step, which is captured. Bytes are those of gradients and
    values of variables that travel in a step, held are variables with the optimizer's slots, and FLOPs what TensorFlow
    counts for a worker's part of the first batch. Of a pipeline it is shown what its stages hold, compute and hand on.
    What the script prints goes to standard error.

    Examples:

    * `autodist plan train.py --epochs 1`

    * `autodist plan --workers 4 --strategy Parallax train.py`

    * `autodist plan --cluster cluster.yml --strategy PS --strategy AllReduce --html plan.html train.py`

    * `autodist plan --json --strategy PS train.py > ps.json`
    """
    if html is not None:
        require_writable(html)
    target = Target(script, is_module, arguments or [])
    asked = Asked(None if cluster is None else str(cluster), workers, replicas)
    plans = Plans(script=script, plans=make_plans_quietly(target, asked, strategies or [])[0])
    if html is not None:
        from autodist.cli.plan_page import page_of

        write_file(html, page_of(plans))
    if as_json:
        typer.echo(plans.model_dump_json(indent=2))
    else:
        show(plans)


def show(plans: Plans) -> None:
    """Shows plans at the terminal's width."""
    from autodist.cli.plan_tables import tables_of

    console = output()
    for table in tables_of(plans.plans, console.width):
        console.print(table)


def make_plans_quietly(
    target: Target, asked: Asked, strategies: Sequence[str]
) -> tuple[tuple[PlannedStrategy, ...], ResourceSpec]:
    """`make_plans`, with what the script prints on standard error."""
    target.require()  # before TensorFlow is imported, which takes seconds
    with importing_tensorflow():
        from autodist.cli.planning import make_plans
    with contextlib.redirect_stdout(sys.stderr):
        return make_plans(target, asked, strategies)
