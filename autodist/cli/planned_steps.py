"""Strategies for the steps of a script in order, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autodist.graph.renaming import Renaming
from autodist.graph.step import CapturedStep
from autodist.kernels import find_holders
from autodist.placement.holder import Holder
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runs.measuring.auto_measurements import known_measurements
from autodist.runs.step_plans import StepPlans
from autodist.sharding import Sharding
from autodist.strategies import BuildsStrategy, arranged, find_auto


class PlannedSteps:
    """Plans each step with the holders of variables that earlier steps have set, as a run does.

    Args:
        builder: builds the strategy.
        spec: the machines.
    """

    def __init__(self, builder: BuildsStrategy, spec: ResourceSpec) -> None:
        self.builder = builder
        self._spec, self._workers = spec, len(spec.workers)
        self._plans = StepPlans(arranged(builder, spec), builder, 0, None)
        self._holders: dict[str, Holder] = {}

    def next(
        self, step: CapturedStep, names: Mapping[str, str], shapes: Mapping[str, Sequence[int]]
    ) -> tuple[strategy_pb2.Strategy, CapturedStep]:
        """Returns the strategy for the next step, and the step with its variables placed by the earlier steps.

        Args:
            step: the step.
            names: maps each variable to its name in the session.
            shapes: shapes of its inputs in the chief's part of the first batch, if known.

        Raises:
            StrategyError: the strategy is not possible for this step.
        """
        placed = replace(
            step, holders={name: self._holders[kept] for name, kept in names.items() if kept in self._holders}
        )
        auto = find_auto(self.builder)
        measurements = None if auto is None else known_measurements(placed, self._spec, shapes, auto.recompute)
        strategy = self._plans.with_shardings(self._plans.build(placed, names, measurements), names)
        self._plans.decide(strategy, names, Renaming())
        if self._workers > 1 and not strategy.HasField("mesh"):
            planned = {node.variable for node in strategy.nodes}
            for name, holder in find_holders(placed, strategy).items():
                if name in planned or not holder.is_everywhere:
                    self._holders[names[name]] = holder
        return strategy, placed

    def keep_shardings(self, shardings: Mapping[str, Sharding], names: Mapping[str, str]) -> None:
        """Stores the shardings of a step's variables for later steps."""
        self._plans.keep_shardings(shardings, names)
