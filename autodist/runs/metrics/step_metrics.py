"""Measures the training steps of one worker, and reports them to the chief every so many steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from autodist.cluster.addresses import split_host_and_port
from autodist.logs.quiet import quiet_briefly
from autodist.proto import strategy_pb2
from autodist.resources import MetricsSection
from autodist.runs.dry_run import active_dry_run
from autodist.runs.metrics.records import StepReport, WorkerReport
from autodist.runs.metrics.trace_schedule import TraceSchedule
from autodist.runs.metrics.writer import MetricsWriter
from autodist.runtime.mailbox import Mailbox, Send
from autodist.runtime.process_usage import SentBytes, peak_memory
from autodist.runtime.traced_times import TracedTimes

if TYPE_CHECKING:
    from autodist.runs.run import Run


@dataclass(frozen=True)
class MeasuredRun:
    """One run of a step, or several in one call, that is being measured.

    Attributes:
        name: name of the step.
        began: its begin, by `time.perf_counter`.
        options: TensorFlow's options that trace the run; None: it is not traced.
        metadata: filled with the trace; None: it is not traced.
        is_quiet: True if lines that TensorFlow logs for a trace are removed from standard error.
    """

    name: str
    began: float
    options: Any = None
    metadata: Any = None
    is_quiet: bool = False

    def running(self) -> AbstractContextManager[None]:
        """Returns the context of the run itself."""
        return quiet_briefly() if self.is_quiet else nullcontext()


NOT_MEASURED = MeasuredRun("", 0.0)


def measure_steps(run: Run) -> StepMetrics | None:
    """Returns the metrics of a run as its YAML requests them; None if it does not, and in a dry run.

    Raises:
        ResourceSpecError: the chief cannot write into the folder.
    """
    section = run.spec.metrics
    if section is None or active_dry_run() is not None:
        return None
    return StepMetrics(run, section, MetricsWriter(run.spec, section) if run.index == 0 else None)


class StepMetrics:
    """The measurements of one worker.

    Args:
        run: the run.
        section: the YAML section.
        writer: on the chief, writes the reports of all workers; None on the others.
    """

    def __init__(self, run: Run, section: MetricsSection, writer: MetricsWriter | None) -> None:
        self._run, self._every, self._writer = run, section.every_steps, writer
        self._send: Send | None = None
        self._schedule = TraceSchedule(run.step, self._announce if writer is not None else None)
        self._announcing: Callable[[int], None] = lambda step: None
        self._open: dict[str, _Sums] = {}
        self._ended_at: float | None = None
        self._sent_bytes: SentBytes | None = None
        run.end.before.append(self._finish)

    def join(self, mailbox: Mailbox | None, addresses: Collection[str]) -> None:
        """Connects this worker's metrics to those of the chief; call it on every worker before the mailbox starts.

        Args:
            mailbox: the mailbox; None with one worker.
            addresses: the addresses of all workers' servers.
        """
        if mailbox is None:
            return
        self._sent_bytes = SentBytes([split_host_and_port(address)[1] for address in addresses])
        self._send = mailbox.open_box(self._receive_report)
        select = mailbox.open_box(lambda _, step: self._schedule.postpone(int(step)))
        others = range(1, self._run.workers)
        self._announcing = lambda step: self._run.guard(select, others, b"%d" % step)

    def begin(self, name: str) -> MeasuredRun:
        """Returns the run of a step that begins now, with the options by which the caller runs it."""
        began = time.perf_counter()
        if not self._schedule.is_due(name, self._run.step):
            return MeasuredRun(name, began)
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        # The agents of other workers filter their output all the time.
        return MeasuredRun(name, began, options, tf.compat.v1.RunMetadata(), is_quiet=self._writer is not None)

    def end(self, measured: MeasuredRun, steps: int, examples: int) -> None:
        """Adds a run that ends now and was counted.

        Args:
            measured: the run.
            steps: the number of steps in the call.
            examples: the number of this worker's examples in each.
        """
        ended = time.perf_counter()
        sums, seconds = self._open.setdefault(measured.name, _Sums()), ended - measured.began
        outside = 0.0 if self._ended_at is None else max(0.0, measured.began - self._ended_at)
        sums.steps, sums.examples = sums.steps + steps, sums.examples + steps * examples
        sums.inside, sums.outside = sums.inside + seconds, sums.outside + outside
        if measured.metadata is not None:
            self._add_trace(measured, seconds, sums, steps)
        self._ended_at = ended
        step = self._run.step
        if step // self._every > (step - steps) // self._every:
            self._report(step)

    def on_plan(self, name: str, strategy: strategy_pb2.Strategy, text: str) -> None:
        """On the chief, records the plan of a training step."""
        if self._writer is not None:
            self._writer.add_plan(name, strategy, text, self._run.step)

    def _add_trace(self, measured: MeasuredRun, seconds: float, sums: _Sums, steps: int) -> None:
        began = time.perf_counter()
        times = TracedTimes.of(measured.metadata.step_stats, self._run.index)
        if times is not None:
            sums.traced = (times.whole / steps, times.compute / steps, times.send / steps, times.wait / steps)
        sums.traced_steps, sums.traced_inside = sums.traced_steps + steps, sums.traced_inside + seconds
        cost = seconds - steps * sums.usual + time.perf_counter() - began
        self._schedule.traced(measured.name, self._run.step, cost)

    def _announce(self, step: int) -> None:
        self._announcing(step)

    def _report(self, step: int) -> None:
        reports = {name: sums.report() for name, sums in self._open.items() if sums.steps}
        self._open = {name: _Sums(last_usual=sums.usual) for name, sums in self._open.items()}
        sent = None if self._sent_bytes is None else self._sent_bytes.now()
        report = WorkerReport(step=step, steps=reports, peak_memory=peak_memory(), bytes_sent=sent)
        if self._writer is not None:
            self._writer.receive(0, report)
        elif self._send is not None:
            self._run.guard(self._send, [0], report.model_dump_json().encode())

    def _receive_report(self, worker: int, message: bytes) -> None:
        if self._writer is not None:
            self._writer.receive(worker, WorkerReport.model_validate_json(message))

    def _finish(self) -> None:
        """Reports the steps since the last report; on the chief, ends the files."""
        has_new = any(sums.steps for sums in self._open.values())
        if has_new and (self._writer is not None or not self._run.end.is_bad):
            self._report(self._run.step)
        if self._writer is not None:
            self._writer.close(waits=not self._run.end.is_bad)


@dataclass
class _Sums:
    """Sums over the runs of a step since the last report; `usual` is the mean time of a run that was not traced."""

    steps: int = 0
    inside: float = 0.0
    outside: float = 0.0
    examples: int = 0
    traced_steps: int = 0
    traced_inside: float = 0.0
    traced: tuple[float, float, float, float] | None = None
    last_usual: float = 0.0

    @property
    def usual(self) -> float:
        timed = self.steps - self.traced_steps
        return (self.inside - self.traced_inside) / timed if timed > 0 else self.last_usual

    def report(self) -> StepReport:
        timed = self.steps - self.traced_steps
        return StepReport(
            steps=self.steps,
            timed=timed,
            inside=self.inside - self.traced_inside if timed else self.inside,
            period=self.inside + self.outside,
            outside=self.outside,
            examples=self.examples,
            traced=self.traced,
        )
