"""Run: one training run as one worker sees it, from the first captured step to the end of the script."""

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
from autodist.graph.step import Step
from autodist.kernels import KERNELS, SETTING_KERNELS, Fetching, Kernel, own_kernels
from autodist.logs.formatting import words_of
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runs import restarts
from autodist.runs.chief_only import ChiefOnly
from autodist.runs.coordination import Coordination
from autodist.runs.dry_run import look
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.fingerprint import Fingerprint, require_equal
from autodist.runs.log_strategy import log_strategy
from autodist.runs.own_values import OwnValues
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
from autodist.runtime.variables import Tracked, VariableTracker
from autodist.strategies import BuildsStrategy
from autodist.verify.recorder import SEED, recorder

_END_LIMIT = 0.5
"""Seconds for a call that was cancelled to come back; what waits for a worker that is gone may never do."""

_REFUSAL = "refusal"
"""Key of what the chief sends in place of a strategy that it cannot make."""


@dataclass
class Run:
    """Holds what lives as long as the run: the other workers, the session, the script's variables.

    Args:
        spec: the machines.
        builder: decides the strategy, on the chief; None on other workers, which are told its decision.
        member: the link to the agent that started this process; None on the chief.
        seed: drawn by the chief for the whole run.
        resumed: `prefix`, `step`, `seed` and `made_by` of the checkpoint that the YAML has the run go on from; empty:
            none.

    Attributes:
        observer: hears of the training steps; what the YAML asks to save puts itself there.
        on_training: called each time that a step which trains is made ready to run on all replicas.
        before_training: called before each step of a function that trains.
        on_first_program: called when the first such step is ready, once; None: nobody waits for that.
        draws: names of operations that draw random numbers from a state which TensorFlow does not show.
        chief: what the chief does for all workers between two steps.
        talk: what the workers tell one another between two steps.
        own_values: initial values that this worker has, and the chief has not.
        end: of the run.
        tables: names of the lookup tables that this worker has filled.
        recorder: records its training steps; None: nobody has asked for that.
        step: how many training steps were made, those before a checkpoint that was restored included.
        is_in_step: whether a training step is running that `step` does not count yet.
        saved_step: of the last checkpoint that was saved or restored; None: there was none.
        saved_as: path of that checkpoint.
    """

    spec: ResourceSpec
    builder: BuildsStrategy | None
    member: WorkerClient | None
    seed: int
    resumed: Mapping[str, Any] = field(default_factory=dict)
    strategy: strategy_pb2.Strategy | None = None
    _engines: GraphRunners | None = None
    _chiefs_early: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = self.member.index if self.member else 0
        self.workers = len(self.spec.workers)
        self.own_values = OwnValues(self.workers > 1, self._chiefs_early)
        self.start_up = StartupProgress(is_chief=self.index == 0)
        self._peers = Peers(self.spec, self.member, self._payload(), self.seed, self.start_up)
        self.tracker = VariableTracker(self.pull)
        self._updates = Updates(self._on_failed_update)
        # All workers do the same in the same order, so threads of the script take turns.
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
        self.coordination = Coordination(self.index, self.workers, self._peers, self.failed_step, self._join, self.land)
        self.end = RunEnd(
            self.spec,
            self.index == 0,
            self._peers,
            self.failed_step,
            lambda: self.guard(self._updates.wait),
            self._close_session,
            self._end_threads,
        )
        self._landings: list[Callable[[], Any]] = []
        self.on_training: Callable[[], None] = lambda: None
        self.before_training: Callable[[], None] = lambda: None
        self.on_first_program: Callable[[], None] | None = None
        self.draws: set[str] = set()
        self.chief = ChiefOnly(self)
        self._awaited_memories: Saved | None = None
        self.observer = StepObserver()
        self.tables: set[str] = set()
        self.recorder = recorder()
        self._plans = StepPlans(self.spec, self.builder, self.index, self.recorder)
        self.step = int(self.resumed.get("step", 0))
        self.is_in_step = False
        before = restarts.before()
        self.saved_step = before.saved if not self.resumed else self.step
        self.saved_as = before.saved_as if not self.resumed else str(self.resumed["prefix"])
        self._has_program = False

    @classmethod
    def begin(
        cls,
        choose: Callable[[], tuple[ResourceSpec, BuildsStrategy]],
        resume: Callable[[ResourceSpec], Mapping[str, Any]] = lambda spec: {},
    ) -> Run:
        """The run that this process takes part in: the chief's own, or the one that its chief has started.

        Args:
            choose: reads machines and strategy; called on the chief, whose choice counts.
            resume: finds the checkpoint that it goes on from, with its seed; likewise.
        """
        member = WorkerClient.from_environment()
        if member is None:
            spec, builder = choose()
            resumed = resume(spec)
            earlier = WorkerLaunch.under_way(spec) if len(spec.workers) > 1 else None
            if earlier is not None:
                return cls(spec, builder, None, earlier.seed, resumed)
            drawn = restarts.seed_of_next_run(
                lambda: SEED if recorder() else resumed.get("seed", secrets.randbelow(2**31))
            )
            return cls(spec, builder, None, drawn, resumed)
        told = json.loads(member.payload)
        draw_from(told["draws"])
        spec, resumed = ResourceSpec.from_payload(told["spec"]), told.get("resumed", {})
        return cls(spec, None, member, told["seed"], resumed, _chiefs_early=told["early"])

    def _payload(self) -> bytes:
        """What the chief tells the others that it starts."""
        told = {
            "spec": self.spec.for_workers().to_payload(),
            "seed": self.seed,
            "resumed": self.resumed,
            "draws": json.dumps(Draws.now().told()),
            "early": self.own_values.told(),
        }
        return json.dumps(told).encode()

    def start_others(self) -> None:
        """On the chief, begins to start the other workers, which import, read data and trace while its script does."""
        self._peers.begin()

    def check_others(self) -> None:
        """Raises, in the chief's script, what has kept the others from coming to their first step.

        Raises:
            ClusterError: they could not be started.
            WorkerFailedError: one of them has ended badly.
        """
        self._peers.check()

    def check_devices(self) -> None:
        """Passes if the GPUs that the machines are said to have are there.

        Raises:
            ResourceSpecError: one is not.
        """
        if any(node.gpus for node in self.spec.nodes):
            present = len(tf.config.list_physical_devices("GPU"))
            node = self.spec.workers[self.index].node if self.member else None
            self.spec.check_gpus(present, node, lambda: GPUSupport.of_this_process().why_too_few(present))

    # -- steps -----------------------------------------------------------------------------------------------------

    def plan(
        self,
        item: Step,
        names: Mapping[str, str],
        rehearses: bool = True,
        shapes: Mapping[str, Sequence[int]] | None = None,
        step: str = "",
    ) -> tuple[strategy_pb2.Strategy, Renaming]:
        """The chief's strategy for a step, and the chief's names for its nodes; the first call waits for the others.

        Args:
            item: the step.
            names: under which the session knows each variable.
            rehearses: whether exactly this item will run, so that the chief may rewrite it before the others join.
            shapes: of the step's inputs, in this worker's part of the first batch, where it is known.
            step: its name, as a person knows it.

        Raises:
            StrategyError: the strategy asks for what cannot be done; before any worker trains.
            CaptureMismatchError: this worker captured another step than the chief.
        """
        self.check_others()
        looks = look()
        if looks is not None and item.gradients:
            looks.comes_to_step(item, names, shapes or {}, rehearses, step)
            return strategy_pb2.Strategy(), Renaming()  # it will not be made
        strategy = self._build(item, names) if self.index == 0 else None
        if self._engines is None:
            if strategy is not None and rehearses and self.workers > 1:
                self._plans.rehearse(item, strategy, names)
            self._start()
        strategy, renaming = self._agree(item, strategy)
        self._plans.decide(strategy, names, renaming)
        if self.strategy is None and strategy.nodes:
            self.strategy = strategy
            if self.index == 0:
                plans, columns = self._plans, self.start_up.columns
                log_strategy(strategy, item, plans.rehearsed, self.spec, columns, shapes or {}, plans.take_seen())
        return strategy, renaming

    def program(
        self,
        item: Step,
        strategy: strategy_pb2.Strategy,
        names: Mapping[str, str],
        fetching: Fetching,
        kernels: Sequence[Kernel] = KERNELS,
    ) -> tuple[Program, Step]:
        """A step rewritten for this worker and ready to run, and the rewritten item.

        Args:
            item: the step.
            strategy: as `plan` gave it.
            names: under which the session knows each variable.
            fetching: which workers fetch what it returns.
            kernels: that rewrite it.

        Raises:
            FetchedElsewhereError: an output is computed on other workers, and workers need not fetch the same things.
        """
        self._has_program = self._has_program or kernels is not SETTING_KERNELS
        if item.gradients:
            self.on_training()
            self.draws |= {node.name for node in item.graph_index.having(Trait.SEEDED)}
        rewritten = self._plans.rewritten(item, strategy, names, fetching, kernels)
        # Guarded, since the first run that is prepared in a session waits for all servers of the run.
        program: Program = self.guard(Program, self.graph_runners, rewritten, list(item.inputs), self._updates)
        if program.land is not None:
            self._landings.append(program.land)
        if item.gradients and self.on_first_program is not None:
            look, self.on_first_program = self.on_first_program, None
            look()
        return program, rewritten

    def _build(self, item: Step, names: Mapping[str, str]) -> strategy_pb2.Strategy:
        """On the chief, the strategy for a step; what it cannot do is raised on all workers, once they have joined."""
        try:
            return self._plans.build(item, names)
        except StrategyError as error:
            if self._peers.have_joined:
                self.coordination.passes()
                self.coordination.exchange(json.dumps({_REFUSAL: str(error)}).encode())
            raise

    def _agree(self, item: Step, strategy: strategy_pb2.Strategy | None) -> tuple[strategy_pb2.Strategy, Renaming]:
        """The chief's strategy, on every worker, for a step that all have captured alike, and the chief's names."""
        self.coordination.passes()
        if strategy is not None and self.workers == 1:
            return strategy, Renaming()
        mine = Fingerprint.of(item, own_kernels())
        if strategy is not None:
            self.coordination.exchange(mine.packed_with(strategy.SerializeToString(deterministic=True)))
            return strategy, Renaming()
        told = self.coordination.exchange()
        if told.startswith(b"{"):
            raise StrategyError(json.loads(told)[_REFUSAL])
        theirs, content = Fingerprint.unpack(told)
        renaming = require_equal(theirs, mine, f"worker {self.index}", item)
        return strategy_pb2.Strategy.FromString(content), renaming

    @property
    def deals_files(self) -> bool:
        """Whether the files of data sets are dealt out to several workers."""
        return self.spec.shard is not None and self.workers > 1

    @property
    def has_idle_workers(self) -> bool:
        """Whether other workers were started, and have had nothing to do but to set variables."""
        return self._peers.have_joined and not self.has_worked

    @property
    def has_worked(self) -> bool:
        """Whether a step was made, or something was reduced: more than that variables were set."""
        return self._has_program or self.coordination.has_work

    # -- start and end ---------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Brings this worker together with the others, where it has not met them."""
        if self._engines is None:
            self.check_others()
            self._start()

    def _start(self) -> None:
        config = session_config(self.spec.workers, self.index)
        self._engines = GraphRunners(self._peers.join(config), config)
        if self._awaited_memories is not None:
            self._engines.memories.resume(self._awaited_memories)
        beside = self._engines.beside
        messages = Messages(beside, self.index, self.workers)
        self._pieces = VariableSlices(beside, self.index, self.workers, self._home)
        mailbox = Mailbox(beside, self.index, self.workers) if self.workers > 1 else None
        spread = VariableBroadcast(beside, self.index, self.workers, self._home)
        self.variable_sync = VariableSync(self._pieces, spread, self.tracker, mailbox, self.guard, self.pull)
        self.coordination.begin(messages, mailbox)

    def _home(self, worker: int, dtype: tf.DType) -> str:
        """The device on which a worker keeps a variable."""
        first = next(iter(self.spec.workers[worker].devices), "cpu:0")
        return home_of(worker, self.workers, first, dtype)

    @property
    def have_joined(self) -> bool:
        """Whether this worker has met the others, so that steps can run."""
        return self._engines is not None

    @property
    def graph_runners(self) -> GraphRunners:
        """Where this worker's steps run; there from the first plan on."""
        assert self._engines is not None, "the first plan starts them"
        return self._engines

    @property
    def pieces(self) -> VariableSlices:
        """Where the variables' values lie; there from the first plan on."""
        return self._pieces

    def _close_session(self) -> None:
        """Takes leave of the other workers' servers, unless one may be gone: that would wait for it for ever."""
        if self._engines is None:
            return
        if not self._peers.have_joined or (self._peers.is_idle and self._updates.is_idle and not self.end.is_bad):
            self.variable_sync.close()
            self.coordination.close()
            self._engines.close()
        else:
            self._engines.abandon()

    def _end_threads(self) -> None:
        """Brings threads back from TensorFlow before Python ends: it aborts a process to which one comes back later.

        Sessions in which nothing runs stay open, since exit handlers of the script may read variables.
        """
        self.coordination.end_reading()
        if self._engines is not None and not (self._peers.is_idle and self._updates.is_idle):
            self._engines.end_runs()
            self._peers.wait_until_idle(_END_LIMIT)

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls what fails if another worker goes away; then raises why that worker went, not what it led to here.

        Raises:
            WorkerFailedError: another worker ended badly.
        """
        return self._peers.guard(call, *args)

    def _on_failed_update(self, error: BaseException) -> BaseException:
        """Lets steps raise what an update beside them failed by: they would wait for that update for ever."""
        told = self._peers.cause_of(error) or ClusterError(
            f"an update of what this worker owns failed: {type(error).__name__}: {words_of(error)}"
        )
        self._peers.fail(told)
        return told

    def _is_refused_by_all(self, error: BaseException, is_before: bool) -> bool:
        """Returns True if all workers refuse the step that this one refuses, before any part of it has run."""
        return self.coordination.is_refused_by_all(error, is_before)

    def _end_others(self, error: BaseException) -> None:
        """Ends the run on the other workers, which wait for a step that this worker's script went on without."""
        kind = ("autodist.errors." if isinstance(error, AutoDistError) else "") + type(error).__name__
        told = f"failed in a step ({kind}: {words_of(error)}), and its script went on"
        if self.index == 0:
            self._peers.abort(f"the chief {told}")
        else:
            self.coordination.give_up(told)

    def have_made(self, steps: int) -> None:
        """Training steps were made, several of them in one call."""
        self.step += steps
        self.observer.after_step()

    def resume_memories(self, saved: Saved) -> None:
        """Restores what kernels keep on this worker from step to step, now or when the first step creates it."""
        if self._engines is None:
            self._awaited_memories = saved
        else:
            self.guard(self._engines.memories.resume, saved)

    # -- variables -------------------------------------------------------------------------------------------------

    def pull(self, read: Tracked | None = None) -> None:
        """Brings the script's variables up to date with the session's.

        Args:
            read: the one that is read, for whose sake it happens: what own steps wrote is brought at once, and
                what only other workers' steps may have written when it is read itself. None: all.
        """
        if self._engines is not None:
            with self.turn:
                self.land()
                if read is None:
                    behind = [t for t in self.tracker if t.may_be_behind]
                else:
                    behind = [t for t in self.tracker if t.is_behind] if read.is_behind else [read]
                self.guard(self._pieces.pull, behind)

    def flush_together(self) -> None:
        """Returns once all is written that the steps of all workers have asked for; all of them call it alike.

        Where no variable is asynchronous, what this worker's own steps have asked for is that.
        """
        if any(t.is_asynchronous for t in self.tracker):
            self.coordination.flush_together()

    def land(self) -> None:
        """Waits until all updates of this worker's steps are written, which may come some steps late."""
        for land in self._landings:
            self.guard(land)
