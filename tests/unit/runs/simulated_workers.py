"""Simulated workers: the control code of a run on several workers, without processes, servers and TensorFlow's steps.

The consensus, the call matching, the coordination, the failed-step guard, the variable sync and the loop of a step are
those of the package. Simulated are the session's variables and the computation of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.functions.running_step import RunningStep
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.runs.chief_only import ChiefOnly
from autodist.runs.coordination import Coordination
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.run import Run
from autodist.runs.variable_sync import VariableSync
from autodist.runtime.batched_transfers import Listing
from autodist.runtime.control_messages import ControlKind, ControlMessage
from autodist.runtime.messages import Messages
from autodist.runtime.variables import LARGE, StoredVariable, TrackedVariable
from tests.unit.runs.scheduler import Queue
from tests.unit.runs.simulated_cluster import WORKERS, Cluster, Mailbox, Process

TRAINED, CONSTANT = "trained", "constant"
"""Variables: a step adds, for each worker, 1 plus the constant to the trained one."""


@dataclass(frozen=True)
class Setting:
    """The kind of training.

    Attributes:
        is_asynchronous: True if steps update the trained variable without waiting for other workers.
        owner: the worker that holds the trained variable; None: every worker.
        is_large: True if the script's objects are freed whenever the session has their values.
    """

    is_asynchronous: bool = False
    owner: int | None = None
    is_large: bool = False


class Variable(TrackedVariable):
    """A variable of the script, whose object holds a number; None once that is freed."""

    def __init__(self, name: str, holder: Holder, is_large: bool, is_asynchronous: bool) -> None:
        super().__init__(SimpleNamespace(name=name), name, holder, is_ahead=False, is_asynchronous=is_asynchronous)
        self._value: np.float64 | None = np.float64(0)
        self._is_large = is_large
        self.assigned = 0.0

    @property
    def byte_size(self) -> int:
        return LARGE if self._is_large else 8

    @property
    def stored(self) -> StoredVariable:
        return StoredVariable(self.shared_name, tf.float64, (), self.holder)

    def read(self) -> Any:
        assert self._value is not None, f"{self.shared_name} is freed"
        return self._value

    def write(self, value: Any) -> None:
        self._value = np.float64(value)

    def fall_behind(self) -> None:
        self._value = None if self._is_large else self._value
        self.is_behind = True

    def assign(self, value: float, is_alike: bool = False) -> None:
        """Writes a value in the script, as `VariableTracker` records it."""
        self.assigned = value
        self._value, self.is_ahead, self.is_behind = np.float64(value), True, False
        self.is_alike = is_alike and not self.is_asynchronous
        self.is_reset |= self.is_alike


class Session:
    """One worker's session, with the interface of `VariableSlices` and of `VariableBroadcast`.

    Attributes:
        values: the variables that this worker holds.
    """

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker, self.workers = worker.index, WORKERS
        self._cluster, self._scheduler = worker.cluster, worker.scheduler
        self.values: dict[str, float] = defaultdict(float)

    def prepare(self, variables: Sequence[Variable], workers: Collection[int]) -> None:
        """Adds no nodes, since there is no graph."""

    def set(
        self, variables: Sequence[Variable], then: Callable[[Any], None], workers: Collection[int] = range(WORKERS)
    ) -> None:
        for variable in variables:
            for worker in workers:
                self._scheduler.hand_over()
                if worker in variable.stored.slices[0].group:
                    self._of(worker).values[variable.stored.shared_name] = float(variable.read())
            then(variable)

    def pull(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            variable.write(self.holder_of(variable).values[variable.shared_name])
            variable.is_behind = False

    def holder_of(self, variable: Variable) -> Session:
        """Returns the session that holds a variable: this one if all do; waits forever if it has ended."""
        owner = variable.slices[0].owner
        holder = self.worker if owner is None else owner
        self._scheduler.wait(lambda: self._cluster.processes[holder].is_alive, f"a value of worker {holder}")
        return self._of(holder)

    def send(self, listing: Listing, read: Callable[[int], Any]) -> None:
        for transfer in listing.transfers:
            content = {one.part: float(read(listing.parts[one.part].value)) for one in transfer.slices}
            for to in listing.after(0) if transfer.to is None else [transfer.to]:
                self._queue(transfer.to, 0, to).put(content)

    def receive(self, listing: Listing) -> None:
        for transfer in listing.to(self.worker):
            source = listing.before(self.worker) if transfer.to is None else 0
            content = self._queue(transfer.to, source, self.worker).get()
            for part, value in content.items():
                held = listing.parts[part].held_by(self.worker)
                self.values.update(dict.fromkeys((copy.suffix for copy in held), value))
            for to in listing.after(self.worker) if transfer.to is None else []:
                self._queue(None, self.worker, to).put(content)

    def _of(self, worker: int) -> Session:
        session: Session = self._cluster.processes[worker].session
        return session

    def _queue(self, target: int | None, source: int, to: int) -> Queue[Any]:
        return self._cluster.queue("values" if target is None else "own values", source, to)


class Tracker:
    """The tracker of a worker's variables; none is aliased."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        self._variables = variables

    def __iter__(self) -> Iterator[Variable]:
        return iter(self._variables)

    def compare_aliased(self) -> None:
        """Compares nothing."""

    def refresh_aliased(self) -> None:
        """Updates nothing."""


class SimulatedWorker(Process):
    """One worker, with the attributes of `autodist.runs.run.Run` that the control code uses.

    Args:
        cluster: all workers.
        index: index of this worker; 0 is the chief.
        setting: the kind of training.

    Attributes:
        variables: the script's variables by name.
        counted: the asynchronous steps: the number of the chief's values before each, and its gradient.
        pushes: the number of the chief's values of the trained variable that have reached this worker.
    """

    workers, have_joined = WORKERS, True
    guard, flush = Run.guard, lambda self: None

    def __init__(self, cluster: Cluster, index: int, setting: Setting) -> None:
        super().__init__(cluster, index)
        self.setting, self.step_lock = setting, nullcontext()
        self._peers = self.peers
        holders = {TRAINED: _holder(setting.owner), CONSTANT: _holder(None)}
        self.variables = {
            name: Variable(name, holder, setting.is_large, setting.is_asynchronous and name == TRAINED)
            for name, holder in holders.items()
        }
        self.tracker, self.session = Tracker([*self.variables.values()]), Session(self)
        self.graph_runners = SimpleNamespace(persistent_buffers=SimpleNamespace(specs={}))
        self.failed_step = FailedStepGuard(lambda: True, None, self._is_refused_by_all, self._end_others)
        self.coordination = Coordination(index, WORKERS, self.peers, self.failed_step, lambda: None, self.flush)
        self.chief = ChiefOnly(self)
        self.counted: list[tuple[int, float]] = []
        self.pushes = 0
        self.before_training, self.count_steps, self.metrics = lambda: None, lambda steps: None, None

    def _is_refused_by_all(self, error: BaseException, is_before: bool) -> bool:
        return self.coordination.is_refused_by_all(error, is_before)

    def _end_others(self, error: BaseException) -> None:
        Run._end_others(self, error)

    def live(self, script: Callable[[SimulatedWorker], None]) -> None:
        """Runs the script from the start of the run to the end of the process."""
        self._mailbox = Mailbox(self)
        graph_runner = SimpleNamespace(graph=tf.Graph())
        messages = Messages(graph_runner, self._mailbox, self.index, WORKERS)
        self.variable_sync = VariableSync(
            self.session, self.session, self.tracker, self._mailbox, self.guard, self.pull
        )
        self._count_pushes()
        self.coordination.waiting = self.variable_sync.waiting_elsewhere
        try:
            self.coordination.begin(messages, self._mailbox)
            script(self)
        except Exception as error:  # noqa: BLE001 - the test examines it
            self.error = error
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001
            self.error = self.error or error
        self.exit()

    def _count_pushes(self) -> None:
        """Counts the chief's values as they reach this worker, before it can begin a step with them."""
        consensus = self.variable_sync._consensus
        assert consensus is not None, "there are several workers"
        receive, pushed = consensus.receive, consensus.pushed

        def count(message: ControlMessage) -> None:
            self.pushes += message.kind is ControlKind.PUSHED and TRAINED in message.names
            receive(message)

        def push(names: Sequence[str], waits: bool) -> None:
            self.pushes += TRAINED in names
            pushed(names, waits)

        consensus.receive, consensus.pushed = count, push

    def _finish(self) -> None:
        """Ends the run as `RunEnd.finish` and `Run._close_session` do."""
        self.failed_step.close(is_survived=self.error is None)
        if self.error is not None or self.peers.failure is not None or self.failed_step:
            self.peers.abort("the chief's script failed")
        else:
            if self.index == 0:
                self._mailbox.close()  # with the inbox loops
            self.variable_sync.close()
            self.coordination.close()
            self.peers.finish()
        if self.index == 0 and self.error is None:
            self.error = self.peers.failure or self.failed_step.error

    # -- calls of the script ---------------------------------------------------------------------------------------

    def pull(self, read: Variable | None = None) -> None:
        behind = [v for v in self.variables.values() if v.may_be_behind]
        self.guard(self.session.pull, behind)

    def read(self, name: str) -> float:
        """Reads a variable in the script."""
        if self.variables[name].may_be_behind:
            self.pull()
        return float(self.variables[name].read())

    def train(self, before: Callable[[], None] = lambda: None, within: Callable[[], None] = lambda: None) -> float:
        """Makes a training step; returns its loss, which is the trained variable's value before the step.

        Args:
            before: called before the step has begun.
            within: called in it.
        """

        def compute(program: Any) -> list[float]:
            within()
            return [self._train_asynchronously() if self.setting.is_asynchronous else self._train_together()]

        with self.failed_step.guarding():
            before()
            (loss,) = self._run_step(compute, [TRAINED], not self.setting.is_asynchronous)
        return loss

    def evaluate(self, is_certain: bool, on_together: Callable[[], None]) -> float:
        """Returns the result of an evaluation.

        Args:
            is_certain: True if all workers are known to make it.
            on_together: called before it if all workers make it together.
        """
        if not self.coordination.is_made_by_all(lambda: ("evaluate", ""), is_certain):
            return self.read(TRAINED) + WORKERS * self.read(CONSTANT)
        on_together()
        with self.failed_step.guarding():
            (result,) = self._run_step(lambda program: [self._evaluate_together()], [], True)
        return result

    # -- steps -----------------------------------------------------------------------------------------------------

    def _run_step(
        self, compute: Callable[[Any], list[float]], written: Sequence[str], in_lockstep: bool
    ) -> list[float]:
        running = SimpleNamespace(
            run=self,
            step=SimpleNamespace(gradients=written),
            variables=self.variables,
            _program=SimpleNamespace(require_fits=lambda *examples: None),
            _rewritten_for=None,
            _holders=None,
            _check=None,
            _written=[self.variables[name] for name in written],
            _keeps_pace=in_lockstep,
            _is_synchronous=in_lockstep,
        )
        running._outputs_of = lambda call, program: RunningStep._outputs_of(running, call, program)
        return RunningStep._make(running, lambda program: lambda *arguments: compute(program), 1, 1, 1)

    def _train_together(self) -> float:
        values, owner = self.session.values, self.setting.owner
        parts = self._exchange("step", [1 + values[CONSTANT], values[TRAINED]])
        if owner in (None, self.index):
            values[TRAINED] += sum(gradient for gradient, _ in parts)
        if owner is not None:
            self._exchange("completion", None)
        return float(parts[self.index if owner is None else owner][1])

    def _train_asynchronously(self) -> float:
        gradient = 1 + self.session.values[CONSTANT]
        holder = self.session.holder_of(self.variables[TRAINED])
        loss = holder.values[TRAINED]
        holder.values[TRAINED] += gradient
        self.counted.append((self.pushes, gradient))
        return float(loss)

    def _evaluate_together(self) -> float:
        values, owner = self.session.values, self.setting.owner
        parts = self._exchange("evaluation", [values[TRAINED], values[CONSTANT]])
        trained = parts[self.index if owner is None else owner][0]
        return float(trained + sum(constant for _, constant in parts))

    def _exchange(self, name: str, content: Any) -> list[Any]:
        """Returns the contents of all workers, once each has reached this point."""
        others = [other for other in range(WORKERS) if other != self.index]
        for other in others:
            self.cluster.queue(name, self.index, other).put(content)
        parts = {other: self.cluster.queue(name, other, self.index).get() for other in others}
        return [content if worker == self.index else parts[worker] for worker in range(WORKERS)]


def _holder(owner: int | None) -> Holder:
    return Holder.whole((), Group.all_workers(WORKERS) if owner is None else Group.of_workers([owner]))
