"""Running step: a captured step of eager variables that can be run, for any holders of the variables."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.capture.captured_resources import Table
from autodist.errors import UnevenBatchError
from autodist.graph.find_stages import written_handles
from autodist.graph.step import CapturedStep, ReplicatedStep, Step
from autodist.kernels import LOCAL_KERNELS, Fetching
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.placement.synchrony import SyncMode
from autodist.proto import strategy_pb2
from autodist.runs.dry_run import active_dry_run
from autodist.runs.measuring.prediction_check import check_of
from autodist.runs.metrics.step_metrics import NOT_MEASURED
from autodist.runs.run import Run
from autodist.runs.variable_sync import is_in_lockstep, is_synchronous
from autodist.runtime.program import Program
from autodist.runtime.runnable import RunMetadata, RunOptions
from autodist.runtime.variables import TrackedVariable

_Run = Callable[[int, RunOptions | None, RunMetadata | None, int], list[np.ndarray]]
"""Runs a program's step or steps; see `Program.run`."""


def prepare(
    run: Run,
    step: CapturedStep,
    sources: Mapping[str, tf.Variable],
    shapes: Mapping[str, Sequence[int]] | None = None,
    tables: Iterable[Table] = (),
    name: str = "",
    batch: Mapping[str, Any] | None = None,
) -> RunningStep:
    """Plans, rewrites and imports a captured step; the first call waits for the other workers.

    Args:
        run: the run.
        step: the step.
        sources: the script's variables, by name.
        shapes: shapes of the inputs in this worker's part of the first batch.
        tables: lookup tables that the step reads.
        name: name of the step for messages.
        batch: values of the inputs in this worker's part of the first batch.

    Raises:
        StrategyError: the strategy is not possible for this step; raised before any worker trains.
        CaptureMismatchError: this worker captured another step than the chief.
    """
    tracked = {v.name: run.tracker.track(sources[v.name], v.is_seed) for v in step.variables}
    run.observer.on_tracked(step, tracked)
    names = {name: one.shared_name for name, one in tracked.items()}
    strategy, renaming = run.steps.plan(_as_settled(step, tracked), names, shapes=shapes, name=name, batch=batch)
    tracked = {renaming.variable(name): one for name, one in tracked.items()}
    running = RunningStep(run, renaming.step(step), strategy, tracked, name)
    if running.is_dry_run:
        return running
    running.rewrite()
    for table in tables:
        if table.name not in run.steps.tables:
            run.steps.tables.add(table.name)
            program, _ = run.steps.program(table.filling(), running.strategy, {}, Fetching.BY_EACH, LOCAL_KERNELS)
            program.run([table.keys, table.values], 0)
    return running


@dataclass
class RunningStep:
    """A step that can be run.

    Attributes:
        run: the run.
        step: the captured step, under the chief's names.
        strategy: the plan for the step.
        variables: variables that it reads or writes, by their names in `step`.
        name: its name for metrics.
    """

    run: Run
    step: CapturedStep
    strategy: strategy_pb2.Strategy
    variables: Mapping[str, TrackedVariable]
    name: str = ""
    _program: Program | None = None
    _rewritten_for: tuple[Holder, ...] = ()
    _repeats: bool | None = None

    def __post_init__(self) -> None:
        self._written = [self.variables[self.step.by_handle[h].name] for h in sorted(written_handles(self.step))]
        self._check = check_of(self.strategy, self.run.index == 0)
        self._keeps_pace, self._is_synchronous = is_in_lockstep(self.strategy), is_synchronous(self.strategy)

    @property
    def is_dry_run(self) -> bool:
        """Returns True if a dry run inspects the script, which then executes no training step."""
        return active_dry_run() is not None and bool(self.step.gradients)

    def __call__(self, values: Sequence[Any], examples: int, all_examples: int = 0) -> list[np.ndarray]:
        """Runs one step on this worker's part of a batch; see `Program.run`."""
        dry_run = active_dry_run()
        if dry_run is not None and self.is_dry_run:
            return dry_run.answers(self.step, values)
        return self._make(lambda program: functools.partial(program.run, values), 1, examples, all_examples)

    @property
    def can_repeat(self) -> bool:
        """True if `repeat` may be called; on the first use for a program, all workers agree on it.

        All workers must make the same number of calls, since they count collective calls. A program
        may be repeatable on some workers only, since each has another part of the step.
        """
        if self._program is None or self._rewritten_for != self._holders:
            return False
        if self._repeats is None:
            can_repeat_here = self.run.recorder is None and self._program.can_repeat
            self._repeats = (
                can_repeat_here if self.run.workers == 1 else self.run.coordination.is_true_everywhere(can_repeat_here)
            )
        return self._repeats

    def repeat(self, batches: Sequence[Sequence[Any]], examples: int, all_examples: int = 0) -> list[np.ndarray]:
        """Runs a step on each of several batches, in one call; see `Program.repeat`."""
        outputs: list[np.ndarray] = []
        for some in self.run.outer_steps.divide(batches, self.run.step):
            outputs = self._make(functools.partial(_repeat, some), len(some), examples, all_examples)
        return outputs

    def _make(
        self, run_of: Callable[[Program], _Run], steps: int, examples: int, all_examples: int
    ) -> list[np.ndarray]:
        metrics = self.run.metrics if self.step.gradients else None
        measured = NOT_MEASURED if metrics is None else metrics.begin(self.name)

        def call(program: Program) -> list[np.ndarray]:
            return run_of(program)(examples, measured.options, measured.metadata, all_examples)

        if self._rewritten_for != self._holders:  # another step, which trains a variable, has moved it since
            self.rewrite()
        assert self._program is not None, "it is there once the step was rewritten"
        self._program.require_fits(examples, all_examples)
        # After all checks that can refuse the step before it has begun.
        self.run.coordination.reach_collective()
        if not self.step.gradients:
            self.run.flush()  # an evaluation must see all writes requested by earlier steps
            return self._outputs_of(call, self._program)
        self.run.before_training()
        self.run.is_in_step = True
        try:
            began = time.perf_counter()
            with measured.running():
                outputs = self._outputs_of(call, self._program)
            if self._check is not None and not self._check.is_done:
                self._check.add(time.perf_counter() - began, steps)
            self.run.count_steps(steps)
            if metrics is not None:
                metrics.end(measured, steps, examples)
        finally:
            self.run.is_in_step = False
        return outputs

    def _outputs_of(self, call: Callable[[Program], list[np.ndarray]], program: Program) -> list[np.ndarray]:
        variable_sync = self.run.variable_sync
        while True:
            action = variable_sync.before_step(
                self.variables.values(), self.run.flush, self._keeps_pace, self._is_synchronous
            )
            empty = None
            try:
                outputs = self.run.guard(call, program)
            except UnevenBatchError as error:  # raised once the step is over
                if error.has_run:
                    raise
                outputs, empty = [], error
            if not variable_sync.after_step(action, self._written):
                break
        for tracked in self._written:
            tracked.fall_behind()
        self.run.tracker.refresh_aliased()
        if empty is not None:
            raise empty
        return outputs

    def after(self, outputs: Callable[[], Any]) -> None:
        """Records a finished step for `autodist verify`, if enabled; not a collective call."""
        if self.run.recorder is not None and self.step.gradients:
            self.run.recorder.after_step(self.step, self.run.index, self._values, outputs)

    def _values(self) -> dict[str, tf.Tensor]:
        """Returns the values of the variables, by name."""
        self.run.pull()
        return {name: tracked.read() for name, tracked in self.variables.items()}

    def require_even(self, all_examples: int) -> None:
        """Checks that a later global batch with this many examples would not be refused.

        Raises:
            UnevenBatchError: the step needs the same number of examples on every replica, and they would differ.
        """
        if self._program is not None:
            self._program.require_even(None, all_examples)

    def rewrite(self) -> None:
        """Makes the program for the current holders, and moves variables that have none yet."""
        step = _as_settled(self.step, self.variables)
        names = {name: one.shared_name for name, one in self.variables.items()}
        self._program, rewritten = self.run.steps.program(step, self.strategy, names, Fetching.BY_ALL)
        planned, everyone = {node.variable for node in self.strategy.nodes}, Group.all_workers(self.run.workers)
        for name, tracked in self.variables.items():
            holder = rewritten.holders.get(name)
            if name in planned or holder is not None:
                self._settle(tracked, holder or Holder.whole(tracked.source.shape.as_list(), everyone))
            tracked.is_asynchronous |= _is_asynchronous(rewritten, name)
        self._rewritten_for, self._repeats = self._holders, None

    def _settle(self, tracked: TrackedVariable, holder: Holder) -> None:
        """Moves a variable to the holder that this step requires."""
        tracked.is_settled = True
        holder = holder.with_copies_of(tracked.holder)
        if holder != tracked.holder:
            if tracked.may_be_behind:
                self.run.pull()
            tracked.holder, tracked.is_ahead = holder, True

    @property
    def _holders(self) -> tuple[Holder, ...]:
        return tuple(tracked.holder for tracked in self.variables.values())


def _repeat(batches: Sequence[Sequence[Any]], program: Program) -> _Run:
    return functools.partial(program.repeat, batches)


def _is_asynchronous(rewritten: Step, name: str) -> bool:
    """Returns True if steps update a variable, or one of its shards, on the owner without waiting for other workers."""
    if not isinstance(rewritten, ReplicatedStep):  # it runs as on one device
        return False
    holder, synchrony_of = rewritten.holders.get(name), rewritten.synchrony_of
    stored = [] if holder is None else [name + one.name for one in holder.slices]
    return any(synchrony_of[one].mode is SyncMode.ASYNCHRONOUS for one in stored if one in synchrony_of)


def _as_settled(step: CapturedStep, variables: Mapping[str, TrackedVariable]) -> CapturedStep:
    """Returns the step with the holders of its variables that earlier steps have set."""
    return replace(step, holders={name: one.holder for name, one in variables.items() if one.is_settled})
