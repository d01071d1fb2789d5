"""`autodist diff`: shows the differences between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import output
from autodist.cli.options import Traceback
from autodist.cli.plans import PlannedStrategy, read_plan

DIFFERENT = 1
"""Exit status if the plans differ, as for the command `diff`."""

_HELP = "A file written by `autodist plan --json`."


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=_HELP, show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help=_HELP, show_default=False)],
    traceback: Traceback = False,
) -> None:
    """Show the variables that two plans place or synchronise differently. Exit status 1: the plans differ.

    Examples:

    * `autodist plan --json --strategy PS train.py > ps.json`

    * `autodist plan --json --strategy AllReduce train.py > ar.json`

    * `autodist diff ps.json ar.json`
    """
    from autodist.cli.plan_tables import side_by_side

    steps = [read_plan(a), read_plan(b)]
    both = {step: (steps[0][step], steps[1][step]) for step in steps[0] if step in steps[1]}
    alone = [step for step in dict.fromkeys([*steps[0], *steps[1]]) if step not in both]
    console, differ, alike = output(), 0, 0
    for plans in both.values():
        names = different(*plans)
        if names:
            heads = [f"{path}: {plan.strategy}" for path, plan in zip((a, b), plans, strict=True)]
            console.print(side_by_side(plans, names, heads))
        differ += len(names)
        alike += len({v.name for plan in plans for v in plan.variables}) - len(names)
    for step in alone:
        console.print(f"{step} is only in the plan {a if step in steps[0] else b}", soft_wrap=True)
    workers = [[worker.name for plan in [*found.values()][:1] for worker in plan.workers] for found in steps]
    if workers[0] != workers[1]:
        console.print(f"workers: {', '.join(workers[0])}\n    and: {', '.join(workers[1])}", soft_wrap=True)
    console.print(f"{differ} variables differ, {alike} are equal")
    if differ or alone or workers[0] != workers[1]:
        raise typer.Exit(DIFFERENT)


def different(one: PlannedStrategy, other: PlannedStrategy) -> list[str]:
    """Returns the names of the variables that are in only one of the plans, or whose plans differ."""
    found = [{variable.name: variable for variable in plan.variables} for plan in (one, other)]
    names = dict.fromkeys([*found[0], *found[1]])
    return [name for name in names if found[0].get(name) != found[1].get(name)]
