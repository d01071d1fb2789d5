"""One worker's view of a training run, from the first captured step to the end of the script."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

from autodist.cluster.hosted_function import HostedFunction
from autodist.cluster.script_client import ScriptClient
from autodist.cluster.timeouts import processor_share
from autodist.cluster.worker_client import WorkerClient
from autodist.errors import ClusterError, StrategyError
from autodist.graph.devices import home_of
from autodist.logs.formatting import words_of
from autodist.placement.group import Place
from autodist.placement.layouts import HeldLayout, held_layout
from autodist.resources import ResourceSpec
from autodist.runs import restarts
from autodist.runs.chief_only import ChiefOnly
from autodist.runs.coordination import Coordination
from autodist.runs.copy_check import CopyCheck
from autodist.runs.early_values import EarlyValueWarning
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.gathered_reads import GatheredReads
from autodist.runs.memory_needs import available_memory
from autodist.runs.metrics.step_metrics import StepMetrics
from autodist.runs.outer_steps import OuterSteps
from autodist.runs.peers import Peers
from autodist.runs.run_end import RunEnd
from autodist.runs.run_steps import RunSteps
from autodist.runs.startup_progress import StartupProgress
from autodist.runs.step_observer import StepObserver
from autodist.runs.variable_sync import VariableSync
from autodist.runs.worker_launch import WorkerLaunch
from autodist.runtime.broadcast import VariableBroadcast
from autodist.runtime.draws import Draws, draw_from
from autodist.runtime.gpus import GPUSupport, count_gpus
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.input_consistency import InputConsistencyCheck
from autodist.runtime.mailbox import Mailbox
from autodist.runtime.messages import Messages
from autodist.runtime.persistent_buffers import Saved
from autodist.runtime.threads import session_config
from autodist.runtime.updates import Updates
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import StoredVariable, TrackedVariable, VariableTracker
from autodist.strategies import BuildsStrategy, divides_variables, find_auto
from autodist.synchronizers import mesh_of
from autodist.verify.recorder import SEED, recorder

_CLOSE_LIMIT = 5.0
"""Seconds to close the connections to other workers' servers, one of which may not respond."""

_END_LIMIT = 0.5
"""Seconds to wait for a cancelled call to return; a call that waits for a lost worker may never return."""

R = TypeVar("R")


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
        divides_variables: True if the strategy divides variables among the workers; on the chief, it follows from the
            builder.
        chooses_by_cost: True if the strategy of several workers follows from measurements, in which all take part; on
            the chief, it follows from the builder.
        hosted: the function that takes part in the run in this process; None: a script does.

    Attributes:
        observer: receives notifications of training steps; used by the YAML's options that save something.
        on_training: called each time a training step is made ready to run on all replicas.
        before_training: called before each step of a training function.
        chief: actions of the chief for all workers between two steps.
        coordination: control plane of the workers between two steps.
        early_values: initial values that this worker has and the chief does not have.
        end: ends the run.
        steps: the plans and programs of the steps.
        recorder: records the training steps; None unless recording is enabled.
        metrics: measures the training steps; None unless the YAML requests it.
        step: number of training steps so far, including those before the restored checkpoint.
        is_in_step: True while a training step runs that `step` does not count yet.
        saved_step: step of the last checkpoint that was saved or restored; None if there is none.
        saved_as: path of that checkpoint.
        target: target of this worker's server; "" before the workers have joined.
    """

    spec: ResourceSpec
    builder: BuildsStrategy | None
    worker_client: WorkerClient | None
    seed: int
    resumed: Mapping[str, Any] = field(default_factory=dict)
    divides_variables: bool = False
    chooses_by_cost: bool = False
    hosted: HostedFunction | None = None
    _graph_runners: GraphRunners | None = None
    _chief_early_values: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = self.worker_client.index if self.worker_client else 0
        self.spec = self.spec.seen_by(self.index)
        self.workers = len(self.spec.workers)
        if self.builder is not None:
            self.divides_variables = divides_variables(self.builder)
            self.chooses_by_cost = self.workers > 1 and find_auto(self.builder) is not None
        self.early_values = EarlyValueWarning(self.workers > 1, self._chief_early_values)
        self.recorder = recorder()
        self.metrics: StepMetrics | None = None
        self.step = int(self.resumed.get("step", 0))
        self.is_in_step = False
        before = restarts.earlier_starts()
        self.saved_step = before.saved if not self.resumed else self.step
        self.saved_as = before.saved_as if not self.resumed else str(self.resumed["prefix"])
        self._init_workers()
        self._init_steps()

    def _init_workers(self) -> None:
        """Makes the objects for the other workers: their start, the calls of all workers, and the end."""
        self.target = ""
        self.startup = StartupProgress(is_chief=self.index == 0)
        script = None if self.hosted is None else self.hosted.script
        self._peers = Peers(self.spec, self.worker_client, self._payload(), self.seed, self.startup, script)
        # All workers run the same steps in the same order, so the script's threads run steps one at a time.
        self.step_lock: AbstractContextManager[object] = threading.RLock() if self.workers > 1 else nullcontext()
        self.failed_step = FailedStepGuard(
            lambda: self._peers.have_joined, self.step_lock, self._is_refused_by_all, self._end_others,
            self.spec.cause_timeout,
        )  # fmt: skip
        self.coordination = Coordination(
            self.index, self.workers, self._peers, self.failed_step, self._join, self.flush
        )
        self._peers.count_calls = lambda: self.coordination.calls_reached if self.steps.are_in_lockstep else None
        self.chief = ChiefOnly(self)
        self.end = RunEnd(
            self.spec, self.index == 0, self._peers, self.failed_step, self.flush, self._close_session,
            self._end_threads,
        )  # fmt: skip
        if self.hosted is not None:
            self.end.host(self.hosted.end)

    def _init_steps(self) -> None:
        """Makes the objects for the script's variables and its steps."""
        self.tracker = VariableTracker(self.pull, self.workers)
        self._gathered_reads = GatheredReads(
            self.index, self.tracker, lambda: available_memory(self.spec.workers, self.index)
        )
        self.updates = Updates(self._on_failed_update, self._on_failed_standing_update)
        self._awaited_buffers: Saved | None = None
        self.input_consistency = InputConsistencyCheck(
            self.index, [w.name for w in self.spec.workers], frozenset(self.spec.feeding_workers),
            lambda: self.coordination.messages, self.guard,
        )  # fmt: skip
        self.steps = RunSteps(self)
        self.outer_steps = OuterSteps(self.guard)
        self.observer = StepObserver()
        self.on_training: Callable[[], None] = lambda: None
        self.before_training: Callable[[], None] = lambda: None

    @classmethod
    def begin(
        cls,
        choose: Callable[[], tuple[ResourceSpec, BuildsStrategy]],
        resume: Callable[[ResourceSpec], Mapping[str, Any]] = lambda spec: {},
        hosted: HostedFunction | None = None,
    ) -> Run:
        """Returns the run that this process takes part in: a new one on the chief, the chief's on other workers.

        Args:
            choose: reads the machines and the strategy; called on the chief only.
            resume: returns the checkpoint to resume from, with its seed; called on the chief only.
            hosted: the function that takes part in this process; None: a script does.
        """
        worker_client = ScriptClient.from_environment() if hosted is None else hosted.client
        if worker_client is None:
            spec, builder = choose()
            resumed = resume(spec)
            earlier = WorkerLaunch.under_way(spec) if len(spec.workers) > 1 else None
            if earlier is not None:
                return cls(spec, builder, None, earlier.seed, resumed, hosted=hosted)
            drawn = restarts.seed_of_next_run(
                lambda: SEED if recorder() else resumed.get("seed", secrets.randbelow(2**31))
            )
            return cls(spec, builder, None, drawn, resumed, hosted=hosted)
        start = json.loads(worker_client.payload)
        draw_from(start["draws"])
        spec, resumed = ResourceSpec.from_payload(start["spec"]), start.get("resumed", {})
        return cls(
            spec, None, worker_client, start["seed"], resumed, start["divides"], start["chooses_by_cost"],
            hosted, _chief_early_values=start["early"],
        )  # fmt: skip

    def _payload(self) -> bytes:
        """Returns the start message from the chief to the other workers, as JSON."""
        content = {
            "spec": self.spec.for_workers().to_payload(),
            "seed": self.seed,
            "resumed": self.resumed,
            "divides": self.divides_variables,
            "chooses_by_cost": self.chooses_by_cost,
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
            present = count_gpus()
            node = self.spec.workers[self.index].node if self.worker_client else None
            self.spec.check_gpus(present, node, lambda: GPUSupport.of_this_process().why_too_few(present))

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
        """True if a step has run or a value was reduced; setting variables does not count."""
        return self.steps.has_program or self.coordination.has_work

    # -- start and end ---------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Connects this worker to the others, unless it is connected."""
        if self._graph_runners is None:
            self.check_others()
            self.start()

    def start(self) -> None:
        """Connects this worker to the others, and makes its session."""
        config = session_config(self.spec.workers, self.index)
        if self.workers > 1:
            self.end.filter_log()
        self.target = self._peers.join(config)
        self._graph_runners = GraphRunners(self.target, config, self.index, self.workers)
        if self._awaited_buffers is not None:
            self._graph_runners.persistent_buffers.resume(self._awaited_buffers)
        control = self._graph_runners.control
        mailbox = Mailbox(self._graph_runners, self.index, self.workers) if self.workers > 1 else None
        messages = Messages(control, mailbox, self.index, self.workers)
        self._variable_slices = VariableSlices(control, self.index, self.workers, self._home)
        broadcast = VariableBroadcast(self._graph_runners, self.index, self.workers, self._home)
        self.variable_sync = VariableSync(
            self._variable_slices, broadcast, self.tracker, mailbox, self.guard, self.pull
        )
        self.coordination.waiting = self.variable_sync.waiting_elsewhere
        if self.metrics is not None:
            self.metrics.join(mailbox, self._peers.addresses)
        self.coordination.begin(messages, mailbox)

    def _home(self, worker: int, dtype: tf.DType, device: str | None = None) -> str:
        """Returns the device on which a worker keeps a variable, or a slice of one that is on the device `device`."""
        first = next(iter(self.spec.workers[worker].devices), "cpu:0")
        return home_of(worker, self.workers, device or first, dtype)

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
        """Closes the connections to the other workers' servers, unless one may be gone: closing would hang.

        The chief ends its inbox loops and standing updates before it ends the other workers, without which they might
        not end. The others end theirs once the chief has ended its script (`_end_threads`), since the chief's server
        logs that.
        """
        if self._graph_runners is None:
            return
        loops, is_good = self._graph_runners.inbox_loops, self._peers.is_idle and self.updates.is_idle
        is_good = is_good and not self.end.is_bad and loops.failure is None
        self.updates.end_standing()
        if self.index == 0:
            is_good = loops.close(_seconds(_CLOSE_LIMIT if is_good else _END_LIMIT)) and is_good
        if is_good and self.index == 0:
            self.outer_steps.warn_of_open_ones()
        if is_good or not self._peers.have_joined:
            self.variable_sync.close()
            self.coordination.close()
        if (is_good and (self.index == 0 or not self.updates.are_standing)) or not self._peers.have_joined:
            self._graph_runners.close(_seconds(_CLOSE_LIMIT))
        else:
            self._graph_runners.abandon()

    def _end_threads(self) -> None:
        """Makes threads return from TensorFlow before Python ends; a thread that returns later aborts the process.

        Sessions without a running call stay open, since exit handlers of the script may read variables.
        """
        self.coordination.end_reading()
        if self._graph_runners is None:
            return
        if self._peers.is_idle and self.updates.is_idle and not self.updates.are_standing:
            self._graph_runners.inbox_loops.close(_seconds(_END_LIMIT))
        else:
            self._graph_runners.end_runs(_seconds(_END_LIMIT))
            self._peers.wait_until_idle(_seconds(_END_LIMIT))
            self.updates.wait_until_ended(_seconds(_END_LIMIT))

    def leave_process(self) -> None:
        """Frees the port of this worker's server and ends the run's threads, once the run has ended.

        The process goes on: variables keep the values that `pull` has read, and evaluations run on this worker alone.
        """
        self.failed_step.end_run(
            ClusterError("The run has ended with the block of autodist.join. Make all training steps within the block.")
        )
        self._graph_runners = None
        self.updates.close(_seconds(_END_LIMIT))
        self._peers.leave_process(_seconds(_END_LIMIT))

    def guard(self, call: Callable[..., R], *args: Any) -> R:
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

    def _on_failed_standing_update(self, error: BaseException) -> BaseException:
        """Makes the step that waits for a failed update of its own gradients raise the error."""
        cause = self._peers.cause_of(error) or error
        self._peers.fail(cause)
        return cause

    def _is_refused_by_all(self, error: BaseException, is_before: bool) -> bool:
        return self.coordination.is_refused_by_all(error, is_before)

    def _end_others(self, error: BaseException) -> None:
        """Ends the run on the other workers, which wait for a step that this worker's script has skipped."""
        reason = self.end.how_it_failed(error)
        if self.index == 0:
            self._peers.abort(f"the chief {reason}")
        else:
            self.coordination.give_up(reason)

    def count_steps(self, steps: int, variables: Iterable[tuple[str, StoredVariable]] | None = None) -> None:
        """Counts training steps, possibly several from one call, and notifies the observer.

        Args:
            steps: the number of steps.
            variables: those of the session that made the step, with their names; None: those of the script.
        """
        self.step += steps
        if self.outer_steps.after(self.step, steps):
            self.tracker.fall_behind()
        strategy = self.steps.strategy
        every = 0 if strategy is None else strategy.mesh.compare_every
        if every and self.workers > 1 and self.step // every > (self.step - steps) // every:
            own = ((t.source.name, t.stored) for t in self.tracker)
            check = CopyCheck(self.index, self._variable_slices, self.coordination.reduce)
            check.compare(own if variables is None else variables, self.step)
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
            read: the variable that is read, brought up to date with others as `GatheredReads` says. None: all.

        Raises:
            StrategyError: there is no room for the values that other workers hold.
        """
        if self._graph_runners is not None:
            with self.step_lock:
                self.flush()
                self.guard(self._variable_slices.pull, self._gathered_reads.of(read))

    def layout(self, source: tf.Variable) -> HeldLayout:
        """Returns, for each dimension of a variable, the axis that divides it, several axes or None.

        Raises:
            StrategyError: no step has used the variable yet.
        """
        tracked, strategy = self.tracker.of(source), self.steps.strategy
        if tracked is None or strategy is None:
            raise StrategyError(
                f"The layout of {source.name} is not known: call ad.layout after the first training step of `fit` or "
                "of a function that uses the variable. Those of sessions stand in the log."
            )
        if not strategy.HasField("mesh"):
            return (None,) * source.shape.rank
        places = [Place(place.worker, place.device) for place in strategy.mesh.places]
        return held_layout(tracked.holder, mesh_of(strategy), places)

    def flush_together(self) -> None:
        """Returns once all writes requested by the steps of all workers have been applied; call it on every worker.

        Without asynchronous variables there are no other writes than those of this worker's own steps.
        """
        if any(t.is_asynchronous for t in self.tracker):
            self.coordination.flush_together()
        self.end_local_steps()

    def end_local_steps(self) -> None:
        """Runs the outer steps for the local steps since the last ones, if there are any; call it on every worker."""
        with self.step_lock:
            if self.outer_steps.end():
                self.tracker.fall_behind()

    def flush(self) -> None:
        """Waits until all updates of this worker's steps are applied, which may be several steps late."""
        if self.updates.have_begun:
            self.guard(self.updates.wait)


def _seconds(limit: float) -> float:
    """Returns a limit for a machine whose processes share processors at present."""
    return limit / processor_share()
