"""Writes the metrics of all workers on the chief, a line for each step that has run."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from autodist.logs.formatting import words_of
from autodist.proto import strategy_pb2
from autodist.resources import MetricsSection, ResourceSpec
from autodist.runs.metrics.line_file import LineFile
from autodist.runs.metrics.records import (
    METRICS_FILE,
    PLANS_FILE,
    MetricsLine,
    PlanRecord,
    StepReport,
    WorkerMetrics,
    WorkerReport,
)
from autodist.runs.metrics.tensorboard import Scalars
from autodist.runs.restarts import earlier_starts
from autodist.waits import Condition

log = logging.getLogger("autodist")

MOST_PENDING = 8
"""Numbers of steps whose reports are incomplete; of more, the oldest is written without the missing reports."""

END_LIMIT = 2.0
"""Seconds at the end of the chief's script to wait for the last reports of the other workers."""


class MetricsWriter:
    """Writes a line once the reports of all workers on one number of steps have arrived, in any order.

    A failure to write is logged once; the training goes on.

    Args:
        spec: the machines.
        section: the YAML section.

    Raises:
        ResourceSpecError: the folder cannot be written.
    """

    def __init__(self, spec: ResourceSpec, section: MetricsSection) -> None:
        self._names = [worker.name for worker in spec.workers]
        self._counted = frozenset(spec.replica_workers)  # on a mesh, others compute on the same examples
        self._earlier, self._started = earlier_starts(), time.time()
        self._changed = Condition()
        self._pending: dict[int, dict[int, WorkerReport]] = {}
        self._written = -1
        folder = Path(section.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines, self._plans = LineFile(folder / METRICS_FILE), LineFile(folder / PLANS_FILE)
        except OSError as error:
            problem = f"{error.filename or folder} cannot be written ({error.strerror}); allowed: the path of a folder"
            raise spec.source.error(("metrics", "folder"), f"{problem} that this process may write") from error
        self._scalars = Scalars(folder) if section.tensorboard else None
        self._has_failed = False

    def add_plan(self, name: str, strategy: strategy_pb2.Strategy, plan: str, step: int) -> None:
        """Writes the plan of a training step.

        Args:
            name: name of the step.
            strategy: its strategy.
            plan: the strategy as text.
            step: number of training steps so far.
        """
        terms = {term.name: term.seconds for term in strategy.choice.terms}
        record = PlanRecord(
            time=time.time(), started=self._started, restarts=self._earlier.count, fault=self._earlier.fault,
            step=step, name=name, script=sys.argv[0], workers=tuple(self._names), builder=strategy.builder,
            predicted=strategy.choice.alternatives[0].seconds if terms else None, terms=terms,
            basis=strategy.choice.basis, plan=plan,
        )  # fmt: skip
        with self._changed:
            self._write(functools.partial(self._plans.add, record.model_dump_json()))

    def receive(self, worker: int, report: WorkerReport) -> None:
        """Takes the report of a worker, from any thread; drops one that is later than `MOST_PENDING` others."""
        with self._changed:
            if report.step <= self._written:
                return
            self._pending.setdefault(report.step, {})[worker] = report
            complete = [step for step, reports in self._pending.items() if len(reports) == len(self._names)]
            last = max(complete, default=-1)
            if len(self._pending) > MOST_PENDING:
                last = max(last, sorted(self._pending)[-MOST_PENDING - 1])
            self._write_until(last)
            self._changed.notify_all()

    def close(self, waits: bool) -> None:
        """Writes what has arrived, and ends the files.

        Args:
            waits: True to wait for the last reports of other workers.
        """
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: not self._pending, END_LIMIT)
            self._write_until(max(self._pending, default=-1))
            for file in (self._lines, self._plans, self._scalars):
                if file is not None:
                    self._write(file.close)
            self._has_failed = True  # a later report has no file

    def _write_until(self, last: int) -> None:
        for step in sorted(step for step in self._pending if step <= last):
            self._written = step
            reports = self._pending.pop(step)
            for name in dict.fromkeys(name for report in reports.values() for name in report.steps):
                line = self._line(step, name, reports)
                self._write(functools.partial(self._lines.add, line.model_dump_json()))
                if self._scalars is not None:
                    self._write(functools.partial(self._scalars.add, line))

    def _line(self, step: int, name: str, reports: dict[int, WorkerReport]) -> MetricsLine:
        own = {worker: report.steps[name] for worker, report in reports.items() if name in report.steps}
        chief = own.get(0)
        examples = sum(report.examples for worker, report in own.items() if worker in self._counted)
        is_complete = chief is not None and self._counted <= own.keys() and examples > 0 and chief.period > 0
        return MetricsLine(
            time=time.time(),
            started=self._started,
            restarts=self._earlier.count,
            step=step,
            name=name,
            steps=max(report.steps for report in own.values()),
            seconds=None if chief is None else chief.seconds,
            examples_per_second=examples / chief.period if is_complete and chief is not None else None,
            workers=len(self._names),
            by_worker=tuple(
                _measured(worker, reports.get(index), own.get(index)) for index, worker in enumerate(self._names)
            ),
        )

    def _write(self, write: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            write()
        except (OSError, tf.errors.OpError) as error:
            self._has_failed = True
            log.warning("the metrics cannot be written any more (%s); the training goes on.", words_of(error))


def _measured(worker: str, report: WorkerReport | None, step: StepReport | None) -> WorkerMetrics:
    if report is None or step is None:
        return WorkerMetrics(worker=worker)
    whole, compute, send, wait = step.traced or (None, None, None, None)
    return WorkerMetrics(
        worker=worker,
        seconds=step.seconds,
        outside=step.outside / step.steps,
        compute=compute,
        wait=wait,
        send=send,
        traced=whole,
        peak_memory=report.peak_memory,
        bytes_sent=report.bytes_sent,
    )
