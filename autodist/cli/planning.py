"""Makes the plans of a script: captures its training steps, and asks each strategy for what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from autodist.cli.planning_look import EndOfLookError, PlanningLook
from autodist.cli.plans import Plans
from autodist.cli.script import Target
from autodist.cli.telling import ScriptFailedError, UsageError
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides, named_builder
from autodist.runs.dry_run import looking


def make_plans(
    target: Target, asked: CliOverrides, strategies: Sequence[str], calls: int | None = None
) -> tuple[Plans, ResourceSpec]:
    """The plans of a script's training steps, and the machines for which they are.

    The script runs in this process, on one device. Its training steps are not made.

    Args:
        target: the script.
        asked: machines in place of the script's; its strategy is not looked at.
        strategies: names of builders or files; none: the script's own.
        calls: at which call of a training step the script is ended; None: once no further step is expected.

    Raises:
        UsageError: it makes no AutoDist, or two, or ends before a training step.
        StrategyError, RewriteError: a strategy asks for what cannot be done.
        ScriptFailedError: the script failed by itself, before a training step.
    """
    target.require()
    with target.as_main():  # a builder of the user's may stand beside the script
        for name in strategies:
            named_builder(name)  # now: the script may take long to come to its step
    look = PlanningLook(asked, strategies, calls)
    with looking(look):
        try:
            target.run_here()
        except EndOfLookError:
            assert look.plans, "it is raised once they are made"
        except ScriptFailedError as error:
            if not look.plans:
                raise
            look.end = f"Behind that, {str(error).removesuffix('.')}."
    if not look.plans:
        raise UsageError(_why_none(target, look.chosen is not None))
    return Plans(script=target.name, plans=tuple(look.plans), note=look.note()), look.spec


def _why_none(target: Target, was_made: bool) -> str:
    if not was_made:
        return (
            f"{target.name} makes no AutoDist. Wrap its training in `ad = AutoDist()` and `with ad.scope():`, as the "
            "README shows."
        )
    return (
        f"{target.name} ended before a training step of its AutoDist. What it trains has to be built in `with "
        "ad.scope():`, a step of its own needs @ad.function, and a graph ad.create_distributed_session(); pass the "
        "arguments, too, with which it trains."
    )
