"""`autodist diff`: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.options import Traceback
from autodist.cli.plans import PlannedStrategy, read_plan
from autodist.cli.telling import output

DIFFERENT = 1
"""Exit status where the plans differ, as of `diff`."""

_HELP = "A file that `autodist plan --json` wrote."


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=_HELP, show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help=_HELP, show_default=False)],
    traceback: Traceback = False,
) -> None:
    """Show the variables that two plans keep or synchronise in different ways. Exit status 1: there are some.

    Examples:

    * `autodist plan --json --strategy PS train.py > ps.json`

    * `autodist plan --json --strategy AllReduce train.py > ar.json`

    * `autodist diff ps.json ar.json`
    """
    from autodist.cli.plan_tables import side_by_side

    plans = [read_plan(a), read_plan(b)]
    names = different(*plans)
    console = output()
    if names:
        heads = [f"{path}: {plan.strategy}" for path, plan in zip((a, b), plans, strict=True)]
        console.print(side_by_side(plans, names, heads))
    workers = [[worker.name for worker in plan.workers] for plan in plans]
    if workers[0] != workers[1]:
        console.print(f"workers: {', '.join(workers[0])}\n    and: {', '.join(workers[1])}", soft_wrap=True)
    alike = len({v.name for plan in plans for v in plan.variables}) - len(names)
    console.print(f"{len(names)} variables differ, {alike} are alike")
    if names or workers[0] != workers[1]:
        raise typer.Exit(DIFFERENT)


def different(one: PlannedStrategy, other: PlannedStrategy) -> list[str]:
    """Names of the variables that stand in one of the plans alone, or of which they say different things."""
    found = [{variable.name: variable for variable in plan.variables} for plan in (one, other)]
    names = dict.fromkeys([*found[0], *found[1]])
    return [name for name in names if found[0].get(name) != found[1].get(name)]
