"""Control scenarios: a script, the order of all threads and a fault, and the claims about every run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest

from autodist.runs import variable_sync
from autodist.runtime import batched_transfers
from tests.unit.runs.control_scripts import ALL, Kind, Line, Script
from tests.unit.runs.scheduler import Scheduler
from tests.unit.runs.simulated_cluster import NAMES, Cluster, Process
from tests.unit.runs.simulated_workers import CONSTANT, TRAINED, Setting, SimulatedWorker

STALL = "a stalled worker"


@dataclass(frozen=True)
class Fault:
    """A fault of a machine or of the network.

    Attributes:
        turn: the turn of the scheduler before which it comes.
        worker: the worker that is killed, or the sender of a lost connection.
        to: receiver of the lost connection; None if the worker is killed.
        kept: number of messages on their way that still arrive.
    """

    turn: int
    worker: int
    to: int | None = None
    kept: int = 0

    def strike(self, cluster: Cluster) -> None:
        if self.to is None:
            cluster.kill(self.worker, self.kept)
        else:
            cluster.lose_link(self.worker, self.to, self.kept)


@dataclass(frozen=True)
class Scenario:
    """A run of all workers.

    Attributes:
        setting: the kind of training.
        lines: the script.
        schedule: the order of all threads; see `Scheduler`.
        fault: the fault; None if there is none.
        states: True if the workers leave their final states for the chief.
        epochs: number of runs: a later one begins once the chief of the earlier one has ended.
    """

    setting: Setting
    lines: tuple[Line, ...]
    schedule: bytes = b""
    fault: Fault | None = None
    states: bool = False
    epochs: int = 1


class ControlRun:
    """The run of a scenario, which checks its claims.

    Args:
        scenario: the scenario.
        scheduler: runs all threads.
    """

    def __init__(self, scenario: Scenario, scheduler: Scheduler) -> None:
        self._scenario, self._scheduler = scenario, scheduler
        self._clusters: list[Cluster] = []
        self._scripts: list[Script] = []
        self._told: list[tuple[Cluster, int, str]] = []
        self._faults = [line for line in scenario.lines if line.is_fault]
        scheduler.on_turn, scheduler.on_stall = self._strike, self._detect_stall

    def run(self) -> None:
        with self._capturing_warnings():
            for _ in range(self._scenario.epochs - 1):
                chief = self._begin().processes[0]
                self._scheduler.run(partial(_has_ended, chief))
            self._begin()
            self._scheduler.run(lambda: all(cluster.is_over for cluster in self._clusters))
        for epoch, (cluster, script) in enumerate(zip(self._clusters, self._scripts, strict=True)):
            self._check(cluster, script, has_fault=epoch == 0 and self._scenario.fault is not None)

    def _begin(self) -> Cluster:
        cluster, setting = Cluster(self._scheduler), self._scenario.setting
        script = Script(setting, self._scenario.lines, self._scenario.states)
        cluster.processes = [SimulatedWorker(cluster, index, setting) for index in ALL]
        for worker in cluster.processes:
            self._scheduler.start(f"worker {worker.index}", partial(worker.live, script.run), worker)
        self._clusters.append(cluster)
        self._scripts.append(script)
        return cluster

    def _strike(self) -> None:
        fault = self._scenario.fault
        if fault is not None and self._scheduler.turns == fault.turn:
            fault.strike(self._clusters[0])

    def _detect_stall(self) -> bool:
        """Ends a run in which workers wait for one whose script has ended, as the stall watch does."""
        for cluster in self._clusters:
            if any(line.kind is Kind.LEAVE for line in self._faults) and not cluster.is_over and cluster.cause is None:
                cluster.end_with_failure(STALL, "waits for a worker that has ended")
                return True
        return False

    @contextmanager
    def _capturing_warnings(self) -> Iterator[None]:
        def warn(text: str, names: str) -> None:
            worker = self._scheduler.current.owner
            assert isinstance(worker, SimulatedWorker)
            self._told.append((worker.cluster, worker.index, names))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(variable_sync, "log", SimpleNamespace(warning=warn))
            yield

    # -- claims ----------------------------------------------------------------------------------------------------

    def _check(self, cluster: Cluster, script: Script, has_fault: bool) -> None:
        for worker in cluster.processes:
            if isinstance(worker.error, AssertionError):
                raise worker.error
        if has_fault or self._faults:
            self._check_cause(cluster)
            return
        for worker in cluster.processes:
            if worker.error is not None:
                raise AssertionError(f"worker {worker.index} ended by {worker.error!r}") from worker.error
        assert cluster.is_released and cluster.cause is None
        self._check_values(cluster, script)
        self._check_warnings(cluster)

    def _check_cause(self, cluster: Cluster) -> None:
        """Checks that all workers have ended well, or with the first cause, which is that of the scenario."""
        if cluster.is_released:
            return
        fault, chief = self._scenario.fault, cluster.processes[0]
        # If a worker's script ends early, another worker may be the first to find that others make other calls.
        culprits = {worker for line in self._faults for worker in (ALL if line.kind is Kind.LEAVE else line.by)}
        culprits |= set() if fault is None else {fault.worker} | ({fault.to} if fault.to is not None else set())
        if cluster.cause is not None:
            assert cluster.cause.worker in {STALL, *(NAMES[worker] for worker in culprits)}, cluster.cause
            assert chief.error is cluster.cause or chief.was_killed or 0 in culprits, repr(chief.error)
        else:  # the chief's own error, which may say that another worker makes other calls
            assert chief.error is not None and (0 in culprits or self._faults), repr(chief.error)

    def _check_values(self, cluster: Cluster, script: Script) -> None:
        workers = cluster.processes
        if not self._scenario.setting.is_asynchronous:
            expected = {worker: script.expected(len(script.lines), worker) for worker in ALL}
            assert script.final == expected, f"{script.final} instead of {expected}"
            return
        if not any(worker.variables[CONSTANT].is_ahead for worker in workers):
            assert len({final[CONSTANT] for final in script.final.values()}) == 1, script.final
        pushes = workers[0].pushes
        if not any(worker.variables[TRAINED].is_ahead for worker in workers):
            later = sum(gradient for worker in workers for push, gradient in worker.counted if push == pushes)
            trained = later + (workers[0].variables[TRAINED].assigned if pushes else 0.0)
            assert all(final[TRAINED] == trained for final in script.final.values()), f"{script.final} is not {trained}"

    def _check_warnings(self, cluster: Cluster) -> None:
        """Checks that a warning tells of dropped writes, and of no other."""
        kinds = {line.kind for line in self._scenario.lines}
        if self._scenario.setting.is_asynchronous or kinds & {Kind.EVALUATE, Kind.VALIDATE, Kind.RESET}:
            return
        dropped, writes = set(), set()
        for line in self._scenario.lines:
            if line.kind is Kind.ASSIGN:
                writes |= {(worker, line.variable) for worker in line.by}
            elif line.kind is Kind.TRAIN:
                dropped |= {(worker, name) for worker, name in writes if (0, name) not in writes}
                writes.clear()
        told = {
            (w, name)
            for where, w, names in self._told
            for name in (TRAINED, CONSTANT)
            if where is cluster and name in names
        }
        # After a void step the chief sends the trained variable in any case: other workers cannot report it as dropped.
        unknown = {(worker, TRAINED) for worker in ALL}
        assert dropped - unknown <= told <= dropped, f"{told} instead of {dropped}"


def run(scenario: Scenario) -> None:
    """Runs a scenario.

    Raises:
        AssertionError: the control code breaks a promise.
    """
    scheduler = Scheduler(scenario.schedule)
    with pytest.MonkeyPatch.context() as patch, scheduler.replacing_waits():
        patch.setattr(batched_transfers, "TRANSFER_BYTES", 8)  # each variable in a message of its own
        logging.disable(logging.CRITICAL)
        try:
            ControlRun(scenario, scheduler).run()
        finally:
            logging.disable(logging.NOTSET)
            scheduler.close()


def _has_ended(process: Process) -> bool:
    return not process.is_alive


def legal(lines: list[Line]) -> tuple[Line, ...]:
    """Returns the lines without resets next to evaluations of some workers, which Keras would reset on these only."""
    kept: list[Line] = []
    segment: list[Line] = []
    for line in [*lines, Line(Kind.TRAIN)]:
        segment.append(line)
        if line.kind is Kind.TRAIN:
            is_alone = any(one.kind is Kind.EVALUATE and one.by != ALL for one in segment)
            kept += [one for one in segment if not (is_alone and one.kind is Kind.RESET)]
            segment = []
    return tuple(kept[:-1])
