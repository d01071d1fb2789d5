"""`autodist plan` and `autodist diff`: show and compare the plans of strategies for a script's training steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import UsageError, output, require_writable, write_file
from autodist.cli.options import Arguments, Cluster, IsModule, Replicas, Script, Strategies, Traceback, Workers
from autodist.cli.plans import PlannedStrategy, Plans, read_plan
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
    save_strategy: Annotated[
        Path | None,
        typer.Option(
            help="Write the strategy as YAML, with a pattern for each variable, to this file.", dir_okay=False
        ),
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
    Activations are the tensors that are kept for the backward pass, FLOPs TensorFlow's count; both are those of a
    worker's part of the first batch. For a pipeline, the plan shows the memory, the
    FLOPs and the transfers of its stages. The script's output goes to standard error.

    Examples:

    * `autodist plan train.py --epochs 1`

    * `autodist plan --workers 4 --strategy Parallax train.py`

    * `autodist plan --cluster cluster.yml --strategy PS --strategy AllReduce --html plan.html train.py`

    * `autodist plan --json --strategy PS train.py > ps.json`
    """
    for file in (html, save_strategy):
        if file is not None:
            require_writable(file)
    target = Target(script, is_module, arguments or [])
    overrides = CliOverrides(None if cluster is None else str(cluster), workers, replicas)
    plans, _ = make_plans_quietly(target, overrides, strategies or [], calls)
    if html is not None:
        from autodist.cli.plan_views import page_of

        write_file(html, page_of(plans))
    if save_strategy is not None:
        write_file(save_strategy, _strategy_file(plans))
    if as_json:
        typer.echo(plans.model_dump_json(indent=2))
    else:
        show(plans)


def _strategy_file(plans: Plans) -> str:
    """Returns the only strategy as YAML.

    Raises:
        UsageError: there are several plans, or YAML cannot express the strategy.
    """
    if len(plans.plans) != 1:
        raise UsageError(
            f"--save-strategy writes one strategy of one step, and there are {len(plans.plans)} plans: a pattern for a "
            "variable of one step would be refused in the others. Choose one --strategy; for a script with several "
            "steps, write the patterns by hand."
        )
    if not plans.plans[0].strategy_file:
        raise UsageError(
            f"--save-strategy cannot write {plans.plans[0].strategy}, which divides the model: settings of variables "
            "do not express that. Its section of the YAML file already does."
        )
    return plans.plans[0].strategy_file


def show(plans: Plans) -> None:
    """Prints plans at the width of the terminal."""
    from autodist.cli.plan_views import tables_of

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
    from autodist.cli.plan_views import side_by_side

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
