"""Makes the plans of a script: captures its training steps and builds each strategy for them."""

from __future__ import annotations

from collections.abc import Sequence

from autodist.cli.command_errors import ScriptFailedError, UsageError
from autodist.cli.planning_dry_run import EndOfDryRunError, PlanningDryRun
from autodist.cli.plans import Plans
from autodist.cli.script import Target
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides, named_builder
from autodist.runs.dry_run import dry_running


def make_plans(
    target: Target, overrides: CliOverrides, strategies: Sequence[str], calls: int | None = None
) -> tuple[Plans, ResourceSpec]:
    """Returns the plans of a script's training steps, and the machines that they are for.

    The script runs in this process, on one device. Its training steps are captured but not run.

    Args:
        target: the script.
        asked: machines that override the script's; its strategy is ignored.
        strategies: names of builders or files; none: the script's own.
        calls: ends the script at this call of a training step; None: as soon as no further step is expected.

    Raises:
        UsageError: the script creates no AutoDist, or two, or ends before a training step.
        StrategyError, RewriteError: a strategy is not possible.
        ScriptFailedError: the script failed before a training step.
    """
    target.require()
    with target.as_main():  # a custom builder may be defined next to the script
        for name in strategies:
            named_builder(name)  # now: the script may take long to reach its first step
    look = PlanningDryRun(overrides, strategies, calls)
    with dry_running(look):
        try:
            target.run_here()
        except EndOfDryRunError:
            assert look.plans, "raised only after the plans are made"
        except ScriptFailedError as error:
            if not look.plans:
                raise
            look.end = f"After that, {str(error).removesuffix('.')}."
    if not look.plans:
        raise UsageError(_why_none(target, look.chosen is not None))
    return Plans(script=target.name, plans=tuple(look.plans), note=look.note()), look.spec


def _why_none(target: Target, was_made: bool) -> str:
    if not was_made:
        return (
            f"{target.name} creates no AutoDist. Wrap its training in `ad = AutoDist()` and `with ad.scope():`, as the "
            "README shows."
        )
    return (
        f"{target.name} ended before a training step of its AutoDist. Build the training in `with ad.scope():`. A "
        "custom step needs @ad.function, and a graph needs ad.create_distributed_session(). Also pass the "
        "arguments with which the script trains."
    )
