"""The steps of a run: their plans, on which all workers agree, and their programs on this worker."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autodist.errors import StrategyError
from autodist.graph.ops import Trait
from autodist.graph.renaming import Renaming
from autodist.graph.step import CapturedStep, Step
from autodist.kernels import KERNELS, SETTING_KERNELS, AnyKernel, Fetching, registered_kernels
from autodist.placement.holder import Holder
from autodist.proto import strategy_pb2
from autodist.resources import Measurements
from autodist.runs.dry_run import active_dry_run
from autodist.runs.fingerprint import Fingerprint, require_equal
from autodist.runs.log_strategy import describe_strategy, log_strategy
from autodist.runs.measuring.auto_measurements import AutoMeasurements
from autodist.runs.measuring.compilation import agreed_compilation
from autodist.runs.measuring.kept_choices import KeptChoices
from autodist.runs.measuring.prediction_check import predicted
from autodist.runs.memory_needs import held_in_one_memory, require_memory
from autodist.runs.step_plans import StepPlans
from autodist.runs.variable_sync import is_in_lockstep
from autodist.runtime.program import Program
from autodist.strategies import find_auto
from autodist.strategies.strategy_file import strategy_yaml

if TYPE_CHECKING:
    from autodist.runs.run import Run

log = logging.getLogger("autodist")

_STEP, _XLA = b"step", b"xla"
"""Measurements that the chief's message requests of all workers: of a step for `Auto`, of its forms for `xla: auto`."""

_REFUSAL = "refusal"
"""JSON key under which the chief sends the reason why it cannot make a strategy, in place of the strategy."""


@dataclass(frozen=True)
class _Measured:
    """The results of measurements for a step, or the choices of an earlier run by its own.

    Attributes:
        measurements: those for `Auto`; None for other builders.
        compilation: what XLA compiles; None: as the YAML or the script says.
    """

    measurements: Measurements | None = None
    compilation: strategy_pb2.Compilation | None = None


_NOT_MEASURED = _Measured()


class RunSteps:
    """Plans the steps of one run, and makes programs of them.

    Attributes:
        strategy: strategy of the first training step; None before its plan.
        draws: names of operations that draw random numbers from a state that TensorFlow does not expose.
        tables: names of the lookup tables that this worker has initialized.
        has_program: True if a program was made that does more than set variables.
        are_in_lockstep: True if all workers make the same number of steps, since each waits for the others.
        choices: strategies that `Auto` or `xla: auto` has chosen.
        on_first_program: called once, when the first training step is ready.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._plans = StepPlans(run.spec, run.builder, run.index, run.recorder)
        self.strategy: strategy_pb2.Strategy | None = None
        self.draws: set[str] = set()
        self.tables: set[str] = set()
        self.has_program, self.are_in_lockstep = False, True
        self.on_first_program: Callable[[], None] | None = None
        self.choices = KeptChoices(run.resumed, run.spec, find_auto(run.builder))
        self._measures: AutoMeasurements | None = None

    def plan(
        self,
        step: CapturedStep,
        names: Mapping[str, str],
        rehearses: bool = True,
        shapes: Mapping[str, Sequence[int]] | None = None,
        name: str = "",
        batch: Mapping[str, Any] | None = None,
    ) -> tuple[strategy_pb2.Strategy, Renaming]:
        """Returns the chief's strategy for a step and the chief's names for its nodes.

        The first call waits for the other workers.

        Args:
            step: the step.
            names: the session's name of each variable.
            rehearses: True if exactly this step will run, so that the chief may rewrite it before the others join.
            shapes: shapes of the step's inputs in this worker's part of the first batch, if known.
            name: name of the step for messages.
            batch: values of the step's inputs in this worker's part of the first batch, if known.

        Raises:
            StrategyError: the strategy is not possible for this step; raised before any worker trains.
            CaptureMismatchError: this worker captured a different step than the chief.
        """
        run = self._run
        run.check_others()
        dry_run = active_dry_run()
        if dry_run is not None and step.gradients:
            dry_run.on_step(step, names, shapes or {}, rehearses, name)
            return strategy_pb2.Strategy(), Renaming()  # a dry run makes no step
        fingerprint: Fingerprint | None = None
        measured = _NOT_MEASURED
        if run.chooses_by_cost or run.spec.xla == "auto":
            fingerprint = Fingerprint.of(step, registered_kernels())
            measured = self._measured(step, fingerprint, names, batch or {}, shapes or {}, name)
        strategy = self._build(step, names, measured) if run.index == 0 else None
        if not run.have_joined:
            if strategy is not None and rehearses and run.workers > 1:
                self._plans.rehearse(step, strategy, names)
            run.start()
        strategy, renaming = self._agree(step, strategy, fingerprint)
        if measured != _NOT_MEASURED and run.index == 0:
            self.choices.add(step, strategy)
        self._plans.decide(strategy, names, renaming)
        self.are_in_lockstep = self.are_in_lockstep and is_in_lockstep(strategy)
        is_first = self.strategy is None and bool(strategy.nodes)
        if is_first:
            self.strategy = strategy
        if run.index == 0 and strategy.nodes:
            self._report(step, strategy, shapes or {}, name, is_first)
        return strategy, renaming

    def _report(
        self,
        step: CapturedStep,
        strategy: strategy_pb2.Strategy,
        shapes: Mapping[str, Sequence[int]],
        name: str,
        is_first: bool,
    ) -> None:
        """On the chief, logs and saves the strategy of the first training step, and records all in the metrics."""
        run, plans = self._run, self._plans
        is_logged = is_first and log.isEnabledFor(logging.INFO)
        if is_first:
            self._save_strategy(strategy)
        if not is_logged and run.metrics is None:
            return
        rewritten, seen = (plans.rehearsed, plans.take_rewriting()) if is_first else (None, None)
        columns = run.startup.columns
        tables, memory = describe_strategy(strategy, step, rewritten, run.spec, columns, shapes, seen)
        if is_logged:
            log_strategy(tables, memory)
        if run.metrics is not None:
            run.metrics.on_plan(name, strategy, tables)

    def divided(
        self, step: CapturedStep, strategy: strategy_pb2.Strategy, names: Mapping[str, str]
    ) -> dict[str, Holder]:
        """Returns the holders of the variables that a mesh divides in a step; later steps keep these shardings."""
        return self._plans.divided(step, strategy, names)

    def program(
        self,
        step: CapturedStep,
        strategy: strategy_pb2.Strategy,
        names: Mapping[str, str],
        fetching: Fetching,
        kernels: Sequence[AnyKernel] = KERNELS,
    ) -> tuple[Program, Step]:
        """Rewrites a step for this worker; returns the program that runs it and the rewritten step.

        Args:
            step: the step.
            strategy: returned by `plan`.
            names: the session's name of each variable.
            fetching: the workers that fetch the outputs.
            kernels: the rewrites to apply.

        Raises:
            FetchedElsewhereError: an output is computed on other workers, and workers may fetch different outputs.
            StrategyError: the variables do not fit into this worker's memory.
        """
        run = self._run
        self.has_program = self.has_program or kernels is not SETTING_KERNELS
        if step.gradients:
            run.on_training()
            self.draws |= {node.name for node in step.graph_index.having(Trait.SEEDED)}
        rewritten = self._plans.rewritten(step, strategy, names, fetching, kernels)
        if step.gradients:
            held = held_in_one_memory(rewritten, strategy, run.spec.workers, run.index)
            require_memory(held, run.spec.workers, run.index)
        # Guarded because the first run prepared in a session waits for all servers of the run.
        about = predicted(strategy)
        program = run.guard(Program, run.graph_runners, rewritten, list(step.inputs), run.updates, about)
        run.outer_steps.add(program)
        if step.gradients and self.on_first_program is not None:
            on_first_program, self.on_first_program = self.on_first_program, None
            on_first_program()
        return program, rewritten

    def _save_strategy(self, strategy: strategy_pb2.Strategy) -> None:
        """Writes the strategy that `Auto` has chosen, if it has a path for it; a failure is logged."""
        auto = find_auto(self._run.builder)
        if auto is None or auto.save_as is None:
            return
        try:
            pathlib.Path(auto.save_as).write_text(strategy_yaml(strategy), encoding="utf-8")
        except OSError as error:  # checked before; the run need not end for it
            log.error("the strategy could not be written to %s: %s", auto.save_as, error.strerror)
        else:
            log.info("the strategy was written to %s", auto.save_as)

    def _measured(
        self,
        step: CapturedStep,
        fingerprint: Fingerprint,
        names: Mapping[str, str],
        batch: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        name: str,
    ) -> _Measured:
        """Returns the measurements for `Auto` and `xla: auto`, or what they chose in the run that this one continues.

        The chief decides what all workers measure, once they are known to have captured the same step.

        Raises:
            CaptureMismatchError: this worker captured a different step than the chief.
            StrategyError: the chief cannot write the file of `save_as`.
        """
        run = self._run
        if not run.have_joined:
            run.start()
        run.coordination.reach_collective()
        kept: strategy_pb2.Strategy | None = None
        if run.index > 0:
            chief, content = Fingerprint.unpack(run.coordination.broadcast())
            require_equal(chief, fingerprint, f"worker {run.index}", step)
        else:
            kept, content = self._what_to_measure(step, names)
            run.coordination.broadcast(fingerprint.packed_with(content))
        if kept is not None:
            compilation: strategy_pb2.Compilation | None = None
            if kept.graph_config.HasField("compilation"):
                compilation = strategy_pb2.Compilation()
                compilation.CopyFrom(kept.graph_config.compilation)
                kept.graph_config.ClearField("compilation")  # builders return none
            chosen = kept.SerializeToString(deterministic=True) if run.chooses_by_cost else b""
            return _Measured(Measurements(chosen=chosen), compilation)
        compilation = agreed_compilation(run, step, names, batch, name) if _XLA in content else None
        if _STEP not in content:
            return _Measured(compilation=compilation)
        self._measures = self._measures or AutoMeasurements(run)
        return _Measured(self._measures.of(step, names, batch, shapes, compilation), compilation)

    def _what_to_measure(
        self, step: CapturedStep, names: Mapping[str, str]
    ) -> tuple[strategy_pb2.Strategy | None, bytes]:
        """On the chief, returns the strategy of the run that this one continues, or else what all workers measure."""
        chooses_strategy = self._run.chooses_by_cost and not self._plans.have_decided(step, names)
        chooses_xla = self._run.spec.xla == "auto"
        if not step.gradients or not (chooses_strategy or chooses_xla):
            return None, b""
        if self.strategy is None:
            self._require_writable()
        kept = self.choices.next_for(step)
        if kept:
            return strategy_pb2.Strategy.FromString(kept), b""
        return None, b" ".join([*([_STEP] if chooses_strategy else []), *([_XLA] if chooses_xla else [])])

    def _require_writable(self) -> None:
        """Checks that the file for the chosen strategy can be written.

        Raises:
            StrategyError: it cannot.
        """
        auto = find_auto(self._run.builder)
        if auto is not None and auto.save_as is not None:
            path = pathlib.Path(auto.save_as)
            if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
                raise StrategyError(
                    f"The strategy cannot be written to `save_as: {path}`, which is no file, or lies in no folder that "
                    "is writable on the chief. Use another path."
                )

    def _build(self, step: CapturedStep, names: Mapping[str, str], measured: _Measured) -> strategy_pb2.Strategy:
        """On the chief, builds the strategy for a step; once all workers have joined, all raise its StrategyError."""
        try:
            return self._plans.build(step, names, measured.measurements, measured.compilation)
        except StrategyError as error:
            if self._run.workers > 1 and self._run.have_joined:
                self._run.coordination.reach_collective()
                self._run.coordination.broadcast(json.dumps({_REFUSAL: str(error)}).encode())
            raise

    def _agree(
        self, step: CapturedStep, strategy: strategy_pb2.Strategy | None, fingerprint: Fingerprint | None
    ) -> tuple[strategy_pb2.Strategy, Renaming]:
        """Returns the chief's strategy and node names on every worker; checks that all captured the same step.

        Args:
            step: the step.
            strategy: the strategy, on the chief.
            fingerprint: fingerprint of the step; None: not computed yet.
        """
        coordination = self._run.coordination
        coordination.reach_collective()
        if strategy is not None and self._run.workers == 1:
            return strategy, Renaming()
        fingerprint = fingerprint or Fingerprint.of(step, registered_kernels())
        if strategy is not None:
            coordination.broadcast(fingerprint.packed_with(strategy.SerializeToString(deterministic=True)))
            return strategy, Renaming()
        message = coordination.broadcast()
        if message.startswith(b"{"):
            raise StrategyError(json.loads(message)[_REFUSAL])
        chief_fingerprint, content = Fingerprint.unpack(message)
        renaming = require_equal(chief_fingerprint, fingerprint, f"worker {self._run.index}", step)
        return strategy_pb2.Strategy.FromString(content), renaming
