"""Makes the plans of a script: captures its first training step, and asks each strategy for what it makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodist.asked import Asked, named_builder
from autodist.cli.planned_step import PlannedStep
from autodist.cli.plans import PlannedStrategy
from autodist.cli.script import Target
from autodist.cli.telling import UsageError
from autodist.graph.item import GraphItem
from autodist.look import looking
from autodist.resources import ResourceSpec
from autodist.runs.step_plans import share_names
from autodist.strategies import BuildsStrategy


def make_plans(
    target: Target, asked: Asked, strategies: Sequence[str]
) -> tuple[tuple[PlannedStrategy, ...], ResourceSpec]:
    """The plans of a script's first training step, and the machines for which they are.

    The script runs in this process, on one device, up to that step.

    Args:
        target: the script.
        asked: machines in place of the script's; its strategy is not looked at.
        strategies: names of builders or files; none: the script's own.

    Raises:
        UsageError: it makes no AutoDist, or two, or ends before a training step.
        StrategyError, RewriteError: a strategy asks for what cannot be done.
        ScriptFailedError: the script failed by itself.
    """
    target.require()
    with target.as_main():  # a builder of the user's may stand beside the script
        for name in strategies:
            named_builder(name)  # now: the script may take long to come to its step
    look = _PlanningLook(asked, strategies)
    with looking(look):
        try:
            target.run_here()
        except _PlannedError:
            assert look.plans is not None, "it is raised once they are made"
    if look.plans is None:
        raise UsageError(_why_none(target, look.chosen is not None))
    return look.plans, look.spec


class _PlannedError(BaseException):
    """Ends the script, whose first training step has been planned."""


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


@dataclass
class _PlanningLook:
    """Lets a script run on one device up to its first step that trains.

    Attributes:
        asked: machines in place of the script's.
        strategies: to be planned; none: the script's own.
        chosen: machines and builder, once the script has made its AutoDist.
        plans: once the script has come to its step.
    """

    asked: Asked
    strategies: Sequence[str]
    chosen: tuple[ResourceSpec, BuildsStrategy] | None = None
    plans: tuple[PlannedStrategy, ...] | None = None

    @property
    def spec(self) -> ResourceSpec:
        """The machines for which the plans are."""
        assert self.chosen is not None, "the script has made its AutoDist"
        return self.chosen[0]

    def choose(self, spec: ResourceSpec, builder: BuildsStrategy) -> ResourceSpec:
        """One device.

        Raises:
            UsageError: the script has made an AutoDist before.
        """
        if self.chosen is not None:
            raise UsageError(
                "the script makes two AutoDist objects, and it is not known which of them is meant; leave one, and "
                "open its scope() again."
            )
        if spec.is_given:
            raise UsageError(
                "the machines of a given cluster are known when its processes have met; say which to plan for, by "
                "--cluster or --workers."
            )
        self.chosen = spec, builder
        return ResourceSpec.local()

    def comes_to_step(
        self, item: GraphItem, names: Mapping[str, str], shapes: Mapping[str, Sequence[int]], rehearses: bool
    ) -> None:
        """Makes the plans and ends the script; also one that catches that, and comes to another step."""
        if self.plans is None:
            assert self.chosen is not None, "the script has made its AutoDist"
            builders = {name: named_builder(name) for name in self.strategies} or {"": self.chosen[1]}
            step = PlannedStep(share_names(item, names), self.spec, shapes, rehearses)
            self.plans = tuple(step.plan(name, builder) for name, builder in builders.items())
        raise _PlannedError
