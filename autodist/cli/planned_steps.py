"""Plans the steps of a script under one strategy, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autodist.graph.placement import Placement
from autodist.graph.renaming import Renaming
from autodist.graph.step import CapturedStep
from autodist.kernels import find_placements
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runs.step_plans import StepPlans
from autodist.strategies import BuildsStrategy, arranged


class PlannedSteps:
    """Plans each step with the variable placements that earlier steps have chosen, as a run does.

    Args:
        builder: builds the strategy.
        spec: the machines.
    """

    def __init__(self, builder: BuildsStrategy, spec: ResourceSpec) -> None:
        self.builder = builder
        self._workers = len(spec.workers)
        self._plans = StepPlans(arranged(builder, spec), builder, 0, None)
        self._placements: dict[str, Placement] = {}

    def next(self, step: CapturedStep, names: Mapping[str, str]) -> tuple[strategy_pb2.Strategy, CapturedStep]:
        """Returns the strategy for the next step, and the step with its variables placed by the earlier steps.

        Args:
            step: the step.
            names: maps each variable to its name in the session.

        Raises:
            StrategyError: the strategy is not possible for this step.
        """
        placed = replace(
            step, placements={name: self._placements[kept] for name, kept in names.items() if kept in self._placements}
        )
        strategy = self._plans.build(placed, names)
        self._plans.decide(strategy, names, Renaming())
        if self._workers > 1:
            planned = {node.variable for node in strategy.nodes}
            for name, placement in find_placements(placed, strategy).items():
                if name in planned or placement != Placement():
                    self._placements[names[name]] = placement
        return strategy, placed
