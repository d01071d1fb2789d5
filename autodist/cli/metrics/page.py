"""The page of `autodist report`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from xml.etree import ElementTree

from autodist.cli.html_page import add, add_bars, add_plot, add_table, begin_page, text_of
from autodist.cli.metrics.history import History, bytes_per_step, workers_of
from autodist.cli.metrics.live import bytes_text, rest_of, seconds_text
from autodist.logs.formatting import counted, listed, readable_seconds
from autodist.runs.metrics.records import MetricsLine, PlanRecord, WorkerMetrics

MOST_POINTS = 1000
"""Points of a line in a plot; of more lines, the means of several in a row are shown."""

_PARTS = ("compute", "wait", "send", "rest of the step", "outside")
_WORKER_HEADS = (
    "worker",
    "step",
    "outside",
    "compute",
    "wait",
    "send",
    "rest of the step",
    "peak memory",
    "sent a step",
)
_TIMES = ("seconds", "outside", "compute", "wait", "send", "traced")


def page_of(history: History) -> str:
    """Returns the page as HTML; names are escaped."""
    script = history.plans[-1].script if history.plans else "a script"
    html, body = begin_page(f"Metrics of {script}")
    first, last = history.lines[0], history.lines[-1]
    starts = len({line.started for line in history.lines})
    about = [
        f"{counted(last.workers, 'worker')}, {last.step} training steps, {counted(starts, 'start')} of the script",
        f"from {_moment(first.started)} to {_moment(last.time)}",
    ]
    add(body, "p", f"{', '.join(about)}.")
    for name in history.names:
        _add_step(body, history, name)
    _add_restarts(body, history)
    return text_of(html)


def _add_step(body: ElementTree.Element, history: History, name: str) -> None:
    lines, plan = history.of(name), history.plan_of(name)
    predicted = None if plan is None else plan.predicted
    add(body, "h2", name)
    add(body, "h3", "Time of a step")
    level = None if predicted is None else ("predicted", predicted)
    _add_plot(body, history.starts_of(name), "seconds", "seconds", level)
    add(body, "h3", "Examples per second")
    _add_plot(body, history.starts_of(name), "examples_per_second", "examples")
    workers = _means(lines)
    add(body, "h3", "Where the time went, by worker")
    add(body, "p", "Means of the steps that were traced, and of the time between two steps.")
    add_bars(body, [(one.worker, _parts(one)) for one in workers], readable_seconds, _PARTS)
    add_table(body, _WORKER_HEADS, [_row(one, lines, index) for index, one in enumerate(workers)], first_number=1)
    add(body, "h3", "Predicted and measured")
    _add_prediction(body, lines, plan)
    if plan is not None and plan.plan:
        add(body, "h3", "Plan")
        add(body, "pre", plan.plan)


def _add_plot(
    body: ElementTree.Element,
    starts: Sequence[Sequence[MetricsLine]],
    key: str,
    unit: str,
    level: tuple[str, float] | None = None,
) -> None:
    series = [
        _thinned([(line.step, value) for line in of if (value := getattr(line, key)) is not None]) for of in starts
    ]
    if not any(series):
        add(body, "p", "Not known.")
        return
    add_plot(
        body, [line for line in series if line], seconds_text if unit == "seconds" else lambda v: f"{v:,.0f}", level
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most about `MOST_POINTS` points: the means of as many groups of neighbours."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def _means(lines: Sequence[MetricsLine]) -> list[WorkerMetrics]:
    """Returns the means of each worker's times, with the latest of its other measurements."""
    found = []
    for index, latest in enumerate(workers_of(lines)):
        own = [line.by_worker[index] for line in lines if index < len(line.by_worker)]
        known = {key: [v for one in own if (v := getattr(one, key)) is not None] for key in _TIMES}
        means = {key: statistics.fmean(values) for key, values in known.items() if values}
        found.append(latest.model_copy(update=means))
    return found


def _parts(one: WorkerMetrics) -> list[float]:
    return [part or 0.0 for part in (one.compute, one.wait, one.send, rest_of(one), one.outside)]


def _row(one: WorkerMetrics, lines: Sequence[MetricsLine], index: int) -> list[str]:
    times = (one.seconds, one.outside, one.compute, one.wait, one.send, rest_of(one))
    memory, sent = bytes_text(one.peak_memory), bytes_text(bytes_per_step(lines, index))
    return [one.worker, *map(seconds_text, times), memory, sent]


def _add_prediction(body: ElementTree.Element, lines: Sequence[MetricsLine], plan: PlanRecord | None) -> None:
    times = [line.seconds for line in lines if line.seconds is not None]
    measured = statistics.median(times) if times else None
    if plan is None or plan.predicted is None:
        builder = "" if plan is None else f": the strategy is {plan.builder}, and only Auto predicts"
        add(body, "p", f"The median of the lines is {seconds_text(measured)} a step. Nothing was predicted{builder}.")
        return
    rows = [["a step", seconds_text(plan.predicted), seconds_text(measured)]]
    rows += [[name, seconds_text(seconds), ""] for name, seconds in plan.terms.items()]
    add_table(body, ("", "predicted", "measured (median of the lines)"), rows, first_number=1)
    if plan.basis:
        add(body, "p", f"The prediction follows from: {plan.basis}.")


def _add_restarts(body: ElementTree.Element, history: History) -> None:
    add(body, "h2", "Restarts")
    restarts = history.restarts
    if not restarts:
        add(body, "p", "None.")
        return
    rows = [[str(one.restarts), _moment(one.time), str(one.step), listed(one.workers), one.fault] for one in restarts]
    add_table(body, ("restart", "time", "from step", "workers", "reason"), rows, first_number=5)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
