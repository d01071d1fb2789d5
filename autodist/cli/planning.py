"""Makes the plans of a script: captures its training steps and builds each strategy for them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from autodist.cli.command_errors import ScriptFailedError, UsageError
from autodist.cli.planned_step import PlannedStep
from autodist.cli.planned_steps import PlannedSteps
from autodist.cli.plans import PlannedStrategy, Plans
from autodist.cli.script import Target
from autodist.graph.flops import with_inferred_shapes
from autodist.graph.step import CapturedStep
from autodist.logs.formatting import listed
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides, named_builder
from autodist.runs.dry_run import dry_running
from autodist.runs.step_plans import share_names
from autodist.strategies import BuildsStrategy


def make_plans(
    target: Target, overrides: CliOverrides, strategies: Sequence[str], calls: int | None = None
) -> tuple[Plans, ResourceSpec]:
    """Returns the plans of a script's training steps, and the machines that they are for.

    The script runs in this process, on one device. Its training steps are captured but not run.

    Args:
        target: the script.
        overrides: the machines in place of the script's; its strategy is ignored.
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
    dry_run = PlanningDryRun(overrides, strategies, calls)
    with dry_running(dry_run):
        try:
            target.run_here()
        except EndOfDryRunError:
            assert dry_run.plans, "raised only after the plans are made"
        except ScriptFailedError as error:
            if not dry_run.plans:
                raise
            dry_run.end = f"After that, {str(error).removesuffix('.')}."
    if not dry_run.plans:
        raise UsageError(_why_none(target, dry_run.chosen is not None))
    return Plans(script=target.name, plans=tuple(dry_run.plans), note=dry_run.note()), dry_run.spec


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


_OF_TRAINING = frozenset({"GradientTape", "gradient", "minimize", "apply_gradients"})
"""The code of a training function contains at least one of these names."""

_AT_ITS_END = "The script then ended."


class EndOfDryRunError(BaseException):
    """Raised in the script to end it once its training steps have been planned."""


@dataclass
class PlanningDryRun:
    """Plans the training steps that a script reaches.

    By default the script continues after a training step only while another of its `@ad.function`s that computes
    gradients has not been called. It ends in any case when it calls a step again. Its steps return ones.

    Attributes:
        overrides: the machines in place of the script's.
        strategies: the strategies to be planned; none: the script's own.
        calls: ends the script at this call of a training step; None: as described above.
        chosen: machines and builder, once the script has created its AutoDist.
        plans: for each step, a plan for each strategy.
        end: the reason why no more steps were planned, as a sentence.
    """

    overrides: CliOverrides
    strategies: Sequence[str]
    calls: int | None = None
    chosen: tuple[ResourceSpec, BuildsStrategy] | None = None
    plans: list[PlannedStrategy] = field(default_factory=list)
    end: str = _AT_ITS_END
    _strategies: dict[str, PlannedSteps] = field(default_factory=dict)
    _planned: dict[tuple[str, frozenset[str]], str] = field(default_factory=dict)
    _expected: Counter[str] = field(default_factory=Counter)
    _calls_made: int = 0
    _is_counted: bool = False
    _is_over: bool = False

    @property
    def spec(self) -> ResourceSpec:
        """The machines that the plans are for."""
        assert self.chosen is not None, "the script has created its AutoDist"
        return self.chosen[0]

    def choose(self, spec: ResourceSpec, builder: BuildsStrategy) -> ResourceSpec:
        """Records the script's machines and builder, and returns a spec of one device for the script.

        Raises:
            UsageError: the script has already created an AutoDist.
        """
        if self.chosen is not None:
            raise UsageError(
                "the script creates two AutoDist objects, and only one can be planned; keep one, and open its scope() "
                "again."
            )
        if spec.is_given:
            raise UsageError(
                "the machines of `nodes: given` are not known until its processes have joined; name the machines to "
                "plan for with --cluster or --workers."
            )
        self.chosen = spec, builder
        return ResourceSpec.local()

    def on_step_defined(self, function: Callable[..., Any]) -> None:
        """Expects a call of the function if it computes gradients."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if isinstance(code, CodeType) and not _OF_TRAINING.isdisjoint(_names_in(code)):
            self._expected[function.__name__] += 1

    def on_nested_call(self, name: str) -> None:
        """Stops expecting a direct call of the function."""
        self._expected -= Counter([name])

    def on_step(
        self,
        step: CapturedStep,
        names: Mapping[str, str],
        shapes: Mapping[str, Sequence[int]],
        rehearses: bool,
        name: str,
    ) -> None:
        """Plans a new step, and ends the script if it must not continue.

        A script that catches the exception and reaches another step is ended again.
        """
        key = name, frozenset(names[gradient.variable] for gradient in step.gradients)
        is_new = key not in self._planned and not self._is_over
        if is_new:
            self._expected -= Counter([name])
            self._planned[key] = self._shown_as(name)
            planned = PlannedStep(share_names(step, names), self.spec, shapes, rehearses)
            self._plan(self._planned[key], names, planned)
        if not rehearses:
            self._end("A session's graph is planned as a whole.")
        self._count_call(is_new)
        self._is_counted = True

    def answers(self, step: CapturedStep, values: Sequence[Any]) -> list[np.ndarray]:
        """Returns ones in the shapes that the step's outputs have for these values, or ends the script."""
        if not self._is_counted:
            self._count_call(is_new=False)
        self._is_counted = False
        shapes = {name: np.shape(value) for name, value in zip(step.inputs, values, strict=True)}
        graph = with_inferred_shapes(step, list(step.outputs), shapes)
        outputs = [graph.get_tensor_by_name(name) for name in step.outputs]
        for output in outputs:
            if not output.shape.is_fully_defined():
                self._end(f"An output of that step has a shape that is known only after the step runs: {output.name}.")
        return [_ones(output) for output in outputs]

    def note(self) -> str:
        """Returns the planned steps, the reason why there are no more, and the option that shows more, on one line."""
        text = f"Planned: {listed(self._planned.values())}. {self.end}"
        if self.end == _AT_ITS_END:
            return text
        return (
            f"{text} Later steps are not shown: `autodist plan --calls N` lets the script continue to its N-th "
            "call of a training step. No step is run; steps before the last one return ones."
        )

    def _shown_as(self, name: str) -> str:
        named = name or "the session's graph"
        before = sum(of_step == name for of_step, _ in self._planned)
        return f"{named} ({before + 1})" if before else named

    def _plan(self, shown_as: str, names: Mapping[str, str], step: PlannedStep) -> None:
        assert self.chosen is not None, "the script has created its AutoDist"
        if not self._strategies:
            builders = {name: named_builder(name) for name in self.strategies} or {"": self.chosen[1]}
            self._strategies = {name: PlannedSteps(builder, self.spec) for name, builder in builders.items()}
        self.plans += [step.plan(name, steps, names, shown_as) for name, steps in self._strategies.items()]

    def _count_call(self, is_new: bool) -> None:
        """Counts a call of a training step, and ends the script at the last one."""
        self._calls_made += 1
        if self._is_over:
            raise EndOfDryRunError
        if self.calls is not None:
            if self._calls_made >= self.calls:
                self._end(f"The script was ended at call {self.calls} of a training step.")
        elif not self._expected:
            self._end("The script was ended there.")
        elif not is_new:
            self._end(f"The script was ended when it called a step again, before {listed(self._expected)}.")

    def _end(self, why: str) -> NoReturn:
        """Ends the script; one that catches the exception is ended again at its next step."""
        if not self._is_over:
            self.end, self._is_over = why, True
        raise EndOfDryRunError


def _names_in(code: CodeType) -> set[str]:
    """Returns the names of globals and attributes in the code of a function and its nested functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def _ones(output: tf.Tensor) -> np.ndarray:
    if output.dtype == tf.string:
        return np.full(output.shape, b"", object)
    return np.ones(output.shape, output.dtype.as_numpy_dtype)
