"""One worker's view of a training run, from the first captured step to the end of the script."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from autodist.cluster.worker_client import WorkerClient
from autodist.errors import AutoDistError, ClusterError, StrategyError
from autodist.graph.devices import home_of
from autodist.graph.ops import Trait
from autodist.graph.renaming import Renaming
from autodist.graph.step import CapturedStep, Step
from autodist.kernels import KERNELS, SETTING_KERNELS, AnyKernel, Fetching, registered_kernels
from autodist.logs.formatting import words_of
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runs import restarts
from autodist.runs.chief_only import ChiefOnly
from autodist.runs.coordination import Coordination
from autodist.runs.dry_run import active_dry_run
from autodist.runs.early_values import EarlyValueWarning
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.fingerprint import Fingerprint, require_equal
from autodist.runs.log_strategy import log_strategy
from autodist.runs.peers import Peers
from autodist.runs.run_end import RunEnd
from autodist.runs.startup_progress import StartupProgress
from autodist.runs.step_observer import StepObserver
from autodist.runs.step_plans import StepPlans
from autodist.runs.variable_sync import VariableSync
from autodist.runs.worker_launch import WorkerLaunch
from autodist.runtime.broadcast import VariableBroadcast
from autodist.runtime.draws import Draws, draw_from
from autodist.runtime.gpus import GPUSupport
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.input_consistency import InputConsistencyCheck
from autodist.runtime.mailbox import Mailbox
from autodist.runtime.messages import Messages
from autodist.runtime.persistent_buffers import Saved
from autodist.runtime.program import Program
from autodist.runtime.threads import session_config
from autodist.runtime.updates import Updates
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import TrackedVariable, VariableTracker
from autodist.strategies import BuildsStrategy
from autodist.verify.recorder import SEED, recorder

_END_LIMIT = 0.5
"""Seconds to wait for a cancelled call to return; a call that waits for a worker that has gone may never return."""

_REFUSAL = "refusal"
"""JSON key under which the chief sends the reason why it cannot make a strategy, in place of the strategy."""


@dataclass
class Run:
    """The state that lives as long as the run: the other workers, the session and the script's variables.

    Args:
        spec: the machines.
        builder: decides the strategy on the chief; None on other workers, which receive the decision.
        worker_client: connection to the agent that started this process; None on the chief.
        seed: drawn by the chief for the whole run.
        resumed: `prefix`, `step`, `seed` and `made_by` of the checkpoint that the run resumes from; empty if it resumes
            from none.

    Attributes:
        observer: receives notifications of training steps; used by the YAML's options that save something.
        on_training: called each time a training step is made ready to run on all replicas.
        before_training: called before each step of a training function.
        on_first_program: called once, when the first training step is ready.
        draws: names of operations that draw random numbers from a state that TensorFlow does not expose.
        chief: actions of the chief for all workers between two steps.
        coordination: control plane of the workers between two steps.
        early_values: initial values that this worker has and the chief does not have.
        end: the end of the run.
        tables: names of the lookup tables that this worker has initialized.
        recorder: records the training steps; None unless recording is enabled.
        step: number of training steps so far, including those before the restored checkpoint.
        is_in_step: True while a training step runs that `step` does not count yet.
        saved_step: step of the last checkpoint that was saved or restored; None if there is none.
        saved_as: path of that checkpoint.
    """

    spec: ResourceSpec
    builder: BuildsStrategy | None
    worker_client: WorkerClient | None
    seed: int
    resumed: Mapping[str, Any] = field(default_factory=dict)
    strategy: strategy_pb2.Strategy | None = None
    _graph_runners: GraphRunners | None = None
    _chief_early_values: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = self.worker_client.index if self.worker_client else 0
        self.workers = len(self.spec.workers)
        self.early_values = EarlyValueWarning(self.workers > 1, self._chief_early_values)
        self.start_up = StartupProgress(is_chief=self.index == 0)
        self._peers = Peers(self.spec, self.worker_client, self._payload(), self.seed, self.start_up)
        self.tracker = VariableTracker(self.pull)
        self._updates = Updates(self._on_failed_update)
        # All workers run the same steps in the same order, so the script's threads run steps one at a time.
        self.turn: AbstractContextManager[object] = threading.RLock() if self.workers > 1 else nullcontext()
        self.failed_step = FailedStepGuard(
            lambda: self._peers.have_joined,
            self.turn,
            self._is_refused_by_all,
            self._end_others,
            self.spec.cause_timeout,
        )
        self.input_consistency = InputConsistencyCheck(
            self.index,
            [w.name for w in self.spec.workers],
            frozenset(self.spec.feeding_workers),
            lambda: self.coordination.messages,
            self.guard,
        )
        self.coordination = Coordination(
            self.index, self.workers, self._peers, self.failed_step, self._join, self.flush
        )
        self.end = RunEnd(
            self.spec,
            self.index == 0,
            self._peers,
            self.failed_step,
            lambda: self.guard(self._updates.wait),
            self._close_session,
            self._end_threads,
        )
        self._flushes: list[Callable[[], Any]] = []
        self.on_training: Callable[[], None] = lambda: None
        self.before_training: Callable[[], None] = lambda: None
        self.on_first_program: Callable[[], None] | None = None
        self.draws: set[str] = set()
        self.chief = ChiefOnly(self)
        self._awaited_buffers: Saved | None = None
        self.observer = StepObserver()
        self.tables: set[str] = set()
        self.recorder = recorder()
        self._plans = StepPlans(self.spec, self.builder, self.index, self.recorder)
        self.step = int(self.resumed.get("step", 0))
        self.is_in_step = False
        before = restarts.earlier_starts()
        self.saved_step = before.saved if not self.resumed else self.step
        self.saved_as = before.saved_as if not self.resumed else str(self.resumed["prefix"])
        self._has_program = False

    @classmethod
    def begin(
        cls,
        choose: Callable[[], tuple[ResourceSpec, BuildsStrategy]],
        resume: Callable[[ResourceSpec], Mapping[str, Any]] = lambda spec: {},
    ) -> Run:
        """Returns the run that this process takes part in: a new one on the chief, the chief's on other workers.

        Args:
            choose: reads the machines and the strategy; called on the chief only.
            resume: returns the checkpoint to resume from, with its seed; called on the chief only.
        """
        worker_client = WorkerClient.from_environment()
        if worker_client is None:
            spec, builder = choose()
            resumed = resume(spec)
            earlier = WorkerLaunch.under_way(spec) if len(spec.workers) > 1 else None
            if earlier is not None:
                return cls(spec, builder, None, earlier.seed, resumed)
            drawn = restarts.seed_of_next_run(
                lambda: SEED if recorder() else resumed.get("seed", secrets.randbelow(2**31))
            )
            return cls(spec, builder, None, drawn, resumed)
        start = json.loads(worker_client.payload)
        draw_from(start["draws"])
        spec, resumed = ResourceSpec.from_payload(start["spec"]), start.get("resumed", {})
        return cls(spec, None, worker_client, start["seed"], resumed, _chief_early_values=start["early"])

    def _payload(self) -> bytes:
        """Returns the start message from the chief to the other workers, as JSON."""
        content = {
            "spec": self.spec.for_workers().to_payload(),
            "seed": self.seed,
            "resumed": self.resumed,
            "draws": json.dumps(Draws.now().to_json()),
            "early": self.early_values.to_json(),
        }
        return json.dumps(content).encode()

    def start_others(self) -> None:
        """On the chief, starts the other workers in the background; they import, read data and trace in parallel."""
        self._peers.begin()

    def check_others(self) -> None:
        """Raises, in the chief's script, the error that keeps the other workers from their first step.

        Raises:
            ClusterError: the other workers could not be started.
            WorkerFailedError: one of them has failed.
        """
        self._peers.check()

    def check_devices(self) -> None:
        """Checks that the GPUs listed for the machines are present.

        Raises:
            ResourceSpecError: a listed GPU is missing.
        """
        if any(node.gpus for node in self.spec.nodes):
            present = len(tf.config.list_physical_devices("GPU"))
            node = self.spec.workers[self.index].node if self.worker_client else None
            self.spec.check_gpus(present, node, lambda: GPUSupport.of_this_process().why_too_few(present))

    # -- steps -----------------------------------------------------------------------------------------------------

    def plan(
        self,
        step: CapturedStep,
        names: Mapping[str, str],
        rehearses: bool = True,
        shapes: Mapping[str, Sequence[int]] | None = None,
        name: str = "",
    ) -> tuple[strategy_pb2.Strategy, Renaming]:
        """Returns the chief's strategy for a step and the chief's names for its nodes.

        The first call waits for the other workers.

        Args:
            step: the step.
            names: the session's name of each variable.
            rehearses: True if exactly this step will run, so that the chief may rewrite it before the others join.
            shapes: shapes of the step's inputs in this worker's part of the first batch, if known.
            name: name of the step for messages.

        Raises:
            StrategyError: the strategy is not possible for this step; raised before any worker trains.
            CaptureMismatchError: this worker captured a different step than the chief.
        """
        self.check_others()
        dry_run = active_dry_run()
        if dry_run is not None and step.gradients:
            dry_run.on_step(step, names, shapes or {}, rehearses, name)
            return strategy_pb2.Strategy(), Renaming()  # a dry run makes no step
        strategy = self._build(step, names) if self.index == 0 else None
        if self._graph_runners is None:
            if strategy is not None and rehearses and self.workers > 1:
                self._plans.rehearse(step, strategy, names)
            self._start()
        strategy, renaming = self._agree(step, strategy)
        self._plans.decide(strategy, names, renaming)
        if self.strategy is None and strategy.nodes:
            self.strategy = strategy
            if self.index == 0:
                plans, columns = self._plans, self.start_up.columns
                log_strategy(strategy, step, plans.rehearsed, self.spec, columns, shapes or {}, plans.take_rewriting())
        return strategy, renaming

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
        """
        self._has_program = self._has_program or kernels is not SETTING_KERNELS
        if step.gradients:
            self.on_training()
            self.draws |= {node.name for node in step.graph_index.having(Trait.SEEDED)}
        rewritten = self._plans.rewritten(step, strategy, names, fetching, kernels)
        # Guarded because the first run prepared in a session waits for all servers of the run.
        program: Program = self.guard(Program, self.graph_runners, rewritten, list(step.inputs), self._updates)
        if program.flush is not None:
            self._flushes.append(program.flush)
        if step.gradients and self.on_first_program is not None:
            on_first_program, self.on_first_program = self.on_first_program, None
            on_first_program()
        return program, rewritten

    def _build(self, step: CapturedStep, names: Mapping[str, str]) -> strategy_pb2.Strategy:
        """On the chief, builds the strategy for a step; once all workers have joined, all raise its StrategyError."""
        try:
            return self._plans.build(step, names)
        except StrategyError as error:
            if self._peers.have_joined:
                self.coordination.reach_collective()
                self.coordination.broadcast(json.dumps({_REFUSAL: str(error)}).encode())
            raise

    def _agree(
        self, step: CapturedStep, strategy: strategy_pb2.Strategy | None
    ) -> tuple[strategy_pb2.Strategy, Renaming]:
        """Returns the chief's strategy and node names on every worker; checks that all captured the same step."""
        self.coordination.reach_collective()
        if strategy is not None and self.workers == 1:
            return strategy, Renaming()
        fingerprint = Fingerprint.of(step, registered_kernels())
        if strategy is not None:
            self.coordination.broadcast(fingerprint.packed_with(strategy.SerializeToString(deterministic=True)))
            return strategy, Renaming()
        message = self.coordination.broadcast()
        if message.startswith(b"{"):
            raise StrategyError(json.loads(message)[_REFUSAL])
        chief_fingerprint, content = Fingerprint.unpack(message)
        renaming = require_equal(chief_fingerprint, fingerprint, f"worker {self.index}", step)
        return strategy_pb2.Strategy.FromString(content), renaming

    @property
    def shards_files(self) -> bool:
        """True if the files of data sets are sharded across several workers."""
        return self.spec.shard is not None and self.workers > 1

    @property
    def has_idle_workers(self) -> bool:
        """True if other workers were started and have done nothing except set variables."""
        return self._peers.have_joined and not self.has_worked

    @property
    def has_worked(self) -> bool:
        """True if a step was made or a value was reduced, that is, more was done than to set variables."""
        return self._has_program or self.coordination.has_work

    # -- start and end ---------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connects this worker to the others, unless it is connected."""
        if self._graph_runners is None:
            self.check_others()
            self._start()

    def _start(self) -> None:
        config = session_config(self.spec.workers, self.index)
        self._graph_runners = GraphRunners(self._peers.join(config), config)
        if self._awaited_buffers is not None:
            self._graph_runners.persistent_buffers.resume(self._awaited_buffers)
        beside = self._graph_runners.control
        messages = Messages(beside, self.index, self.workers)
        self._variable_slices = VariableSlices(beside, self.index, self.workers, self._home)
        mailbox = Mailbox(beside, self.index, self.workers) if self.workers > 1 else None
        spread = VariableBroadcast(beside, self.index, self.workers, self._home)
        self.variable_sync = VariableSync(self._variable_slices, spread, self.tracker, mailbox, self.guard, self.pull)
        self.coordination.begin(messages, mailbox)

    def _home(self, worker: int, dtype: tf.DType) -> str:
        """Returns the device on which a worker keeps a variable."""
        first = next(iter(self.spec.workers[worker].devices), "cpu:0")
        return home_of(worker, self.workers, first, dtype)

    @property
    def have_joined(self) -> bool:
        """True if this worker has joined the others, so that steps can run."""
        return self._graph_runners is not None

    @property
    def graph_runners(self) -> GraphRunners:
        """The graph runners that execute this worker's steps; available from the first plan on."""
        assert self._graph_runners is not None, "the first plan starts them"
        return self._graph_runners

    @property
    def variable_slices(self) -> VariableSlices:
        """The storage of the variables' values; available from the first plan on."""
        return self._variable_slices

    def _close_session(self) -> None:
        """Closes the connections to the other workers' servers, unless one may be gone: closing would hang."""
        if self._graph_runners is None:
            return
        if not self._peers.have_joined or (self._peers.is_idle and self._updates.is_idle and not self.end.is_bad):
            self.variable_sync.close()
            self.coordination.close()
            self._graph_runners.close()
        else:
            self._graph_runners.abandon()

    def _end_threads(self) -> None:
        """Makes threads return from TensorFlow before Python ends; a thread that returns later aborts the process.

        Sessions without a running call stay open, since exit handlers of the script may read variables.
        """
        self.coordination.end_reading()
        if self._graph_runners is not None and not (self._peers.is_idle and self._updates.is_idle):
            self._graph_runners.end_runs()
            self._peers.wait_until_idle(_END_LIMIT)

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that fails if another worker goes away; raises the cause rather than the local symptom.

        Raises:
            WorkerFailedError: another worker failed.
        """
        return self._peers.guard(call, *args)

    def _on_failed_update(self, error: BaseException) -> BaseException:
        """Makes later steps raise the error of a failed background update; they would wait for it forever."""
        cause = self._peers.cause_of(error) or ClusterError(
            f"an update of variables owned by this worker failed: {type(error).__name__}: {words_of(error)}"
        )
        self._peers.fail(cause)
        return cause

    def _is_refused_by_all(self, error: BaseException, is_before: bool) -> bool:
        """Returns True if all workers refuse the same step before any part of it has run."""
        return self.coordination.is_refused_by_all(error, is_before)

    def _end_others(self, error: BaseException) -> None:
        """Ends the run on the other workers, which wait for a step that this worker's script has skipped."""
        kind = ("autodist.errors." if isinstance(error, AutoDistError) else "") + type(error).__name__
        reason = f"failed in a step ({kind}: {words_of(error)}), and its script went on"
        if self.index == 0:
            self._peers.abort(f"the chief {reason}")
        else:
            self.coordination.give_up(reason)

    def count_steps(self, steps: int) -> None:
        """Counts training steps, possibly several from one call, and notifies the observer."""
        self.step += steps
        self.observer.after_step()

    def restore_buffers(self, saved: Saved) -> None:
        """Restores this worker's persistent buffers, now or when the first step creates them."""
        if self._graph_runners is None:
            self._awaited_buffers = saved
        else:
            self.guard(self._graph_runners.persistent_buffers.resume, saved)

    # -- variables -------------------------------------------------------------------------------------------------

    def pull(self, read: TrackedVariable | None = None) -> None:
        """Updates the script's variables to the session's values.

        Args:
            read: the variable that is read. If this worker's steps have written it, all that they have written are
                updated. If only other workers' steps may have written it, it alone is updated. None: all.
        """
        if self._graph_runners is not None:
            with self.turn:
                self.flush()
                if read is None:
                    behind = [t for t in self.tracker if t.may_be_behind]
                else:
                    behind = [t for t in self.tracker if t.is_behind] if read.is_behind else [read]
                self.guard(self._variable_slices.pull, behind)

    def flush_together(self) -> None:
        """Returns once all writes requested by the steps of all workers have been applied; call it on every worker.

        Without asynchronous variables, the writes of this worker's own steps are all of them.
        """
        if any(t.is_asynchronous for t in self.tracker):
            self.coordination.flush_together()

    def flush(self) -> None:
        """Waits until all updates of this worker's steps are applied, which may be several steps late."""
        for flush in self._flushes:
            self.guard(flush)
