"""The live view of `autodist top`: a table of the steps with sparklines, and a table of the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autodist.cli.metrics.history import History, bytes_per_step, workers_of
from autodist.logs.formatting import counted, readable_bytes, readable_seconds
from autodist.logs.tables import text_table
from autodist.runs.metrics.records import MetricsLine, WorkerMetrics

_BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
UNKNOWN = "–"

STEP_HEADS = ("step", "number", "time", "examples/s", "time and examples/s in the last lines")
WORKER_HEADS = ("worker", "step\noutside", "compute", "wait", "send", "rest", "memory\nsent a step")


def view_of(history: History, title: str) -> RenderableType:
    """Returns the view of a run."""
    if not history.lines:
        return Text(f"{title}: no line yet; the first one follows after `every_steps` steps")
    return Group(*_parts(history, title))


def _parts(history: History, title: str) -> Iterator[RenderableType]:
    last = history.lines[-1]
    at = time.strftime("%H:%M:%S", time.localtime(last.time))
    about = [f"step {last.step}", counted(last.workers, "worker"), counted(last.restarts, "restart")]
    yield Text(f"{title}: {', '.join(about)}; last line at {at}")
    yield _steps(history)
    for name in history.names:
        lines = history.of(name)
        if lines[-1].started == last.started:
            yield _workers(name, lines)
    plan = history.restarts[-1] if last.restarts and history.restarts else None
    if plan is not None:
        yield Text(f"restart {plan.restarts}, after step {plan.step}: {plan.fault}")


def _steps(history: History) -> Table:
    rows = []
    for name in history.names:
        lines = history.of(name)
        last = lines[-1]
        rate = UNKNOWN if last.examples_per_second is None else f"{last.examples_per_second:,.0f}"
        times, rates = ([getattr(line, key) for line in lines] for key in ("seconds", "examples_per_second"))
        sparks = "\n".join(filter(None, (sparkline(times), sparkline(rates))))
        rows.append([name, str(last.step), seconds_text(last.seconds), rate, sparks])
    return text_table("", STEP_HEADS, rows, numbers=STEP_HEADS[1:4])


def _workers(name: str, lines: Sequence[MetricsLine]) -> Table:
    rows = [_row(measured, bytes_per_step(lines, index)) for index, measured in enumerate(workers_of(lines))]
    return text_table(f"{name}, by worker", WORKER_HEADS, rows, numbers=WORKER_HEADS[1:], has_lines=True)


def _row(measured: WorkerMetrics, sent: float | None) -> list[str]:
    parts = (measured.compute, measured.wait, measured.send, rest_of(measured))
    return [
        measured.worker,
        f"{seconds_text(measured.seconds)}\n{seconds_text(measured.outside)}",
        *(_part(part, measured.traced) for part in parts),
        f"{bytes_text(measured.peak_memory)}\n{bytes_text(sent)}",
    ]


def rest_of(measured: WorkerMetrics) -> float | None:
    """Returns the time of the traced step in which nothing computed, waited or was sent; None: none was traced."""
    if measured.traced is None:
        return None
    known = (measured.compute or 0.0) + (measured.wait or 0.0) + (measured.send or 0.0)
    return max(0.0, measured.traced - known)


def seconds_text(seconds: float | None) -> str:
    """Formats a time; None: it is not known."""
    return UNKNOWN if seconds is None else "0" if seconds == 0 else readable_seconds(seconds)


def bytes_text(count: float | None) -> str:
    """Formats a number of bytes; None: it is not known."""
    return UNKNOWN if count is None else readable_bytes(round(count))


def _part(part: float | None, whole: float | None) -> str:
    if part is None or not whole:
        return UNKNOWN
    return f"{seconds_text(part)}\n({part / whole:.0%})" if part else "0"


def sparkline(values: Sequence[float | None], width: int = SPARK_WIDTH) -> str:
    """Returns the last values as blocks whose height grows with the value; "" without a known value.

    >>> sparkline([1.0, 2.0, None, 8.0, 4.0], width=4)
    '▂ █▄'
    """
    last = values[-width:]
    top = max((value for value in last if value is not None), default=0.0)
    if not top:
        return ""
    heights = [None if value is None else int(value / top * len(_BLOCKS)) for value in last]
    return "".join(" " if height is None else _BLOCKS[max(0, height - 1)] for height in heights)
