"""Output of `autodist trace`: the time spent in a step as a table and as text, and the merged trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from autodist.cli.tracing.files import Event, Trace
from autodist.cli.tracing.spent import ANYBODY, TimeSpent, kind_of
from autodist.logs.formatting import readable_bytes, readable_seconds
from autodist.logs.tables import text_table

PREDICTED = {
    "computing": ("computation", "updates"),
    "sending": ("network", "processor time of transfers"),
    "waiting": ("waits", "shared cores"),
}
"""The parts of a prediction that an activity of a trace shows."""

_LEAST_SHOWN = 0.05
"""Fraction of a step above which a worker's waiting is mentioned."""


def table_of(step: str, times: Sequence[TimeSpent]) -> Table:
    """Returns a table with a row for each worker."""
    figures = ["took", "computing", "sending", "reading", "waiting", "rest"]
    names = worker_names([spent.trace for spent in times])
    rows = []
    for spent in times:
        parts = (spent.computing, spent.sending, spent.reading, spent.waited, spent.rest)
        rows.append([names[spent.trace.worker], _time(spent.took), *(_part(p, spent.took, "\n") for p in parts)])
    return text_table(f"{step}: the run that was traced, by worker", ["worker", *figures], rows, numbers=figures)


def prediction_table(step: str, times: Sequence[TimeSpent]) -> Table | None:
    """Returns a table of predicted and traced times, of the worker that computed longest; None without a prediction."""
    predicted = next((spent.trace.predicted for spent in times if spent.trace.predicted is not None), None)
    if predicted is None:
        return None
    busiest = max(times, key=lambda spent: spent.computing)
    name = worker_names([spent.trace for spent in times])[busiest.trace.worker]
    traced = {"computing": busiest.computing, "sending": busiest.sending, "waiting": busiest.waited}
    rows = [["a step", readable_seconds(predicted.seconds), _time(busiest.took)]]
    for activity, parts in PREDICTED.items():
        seconds = sum(predicted.terms.get(part, 0.0) for part in parts)
        rows.append([f"{activity} ({', '.join(parts)})", readable_seconds(seconds), _time(traced[activity])])
    return text_table(
        f"{step}: predicted by Auto, and traced on {name}, which computed longest", ["", "predicted", "traced"], rows,
        numbers=["predicted", "traced"], caption="Tracing makes a run slower; the log has the time of the other steps.",
    )  # fmt: skip


def summary_lines(times: Sequence[TimeSpent]) -> Iterator[str]:
    """Yields sentences on the waits of each worker, its bytes sent, and the cause of delays."""
    names = worker_names([spent.trace for spent in times])
    for spent in times:
        own = names[spent.trace.worker]
        for (awaited, meanwhile), waited in sorted(spent.waiting.items(), key=lambda entry: -entry[1]):
            if waited >= _LEAST_SHOWN * spent.took:
                yield f"{own} waits {_part(waited, spent.took)} for {_name(awaited, names)}, which {meanwhile.value}"
        if spent.sent:
            sent = ", ".join(f"{readable_bytes(n)} to {_name(to, names)}" for to, n in sorted(spent.sent.items()))
            yield f"{own} sends {sent}"
    yield from _verdict(times, names)


def alignment_lines(traces: Sequence[Trace]) -> Iterator[str]:
    """Yields sentences on the accuracy of the clocks, and on missing traces."""
    workers = {trace.worker for trace in traces}
    known = [trace.uncertainty for trace in traces if trace.worker and trace.uncertainty is not None]
    if known:
        yield f"clocks are aligned with the chief's to ± {readable_seconds(max(known))}"
    for worker in sorted({trace.worker for trace in traces if trace.uncertainty is None}):
        yield (
            f"worker {worker}'s clock was not compared with the chief's (its trace is from an older AutoDist): its "
            "times are those of its own machine"
        )
    missing = sorted(set(range(max(trace.workers for trace in traces))) - workers)
    if missing:
        which = ", ".join(f"*.worker_{worker}.json" for worker in missing)
        yield f"missing: {which}; copy them from the folder of that name on their workers' machines"


def worker_names(traces: Sequence[Trace]) -> dict[int, str]:
    """Returns the workers' display names, with their machines if there are several."""
    several = len({trace.machine for trace in traces}) > 1
    return {trace.worker: f"worker {trace.worker}" + (f" ({trace.machine})" if several else "") for trace in traces}


def _verdict(times: Sequence[TimeSpent], names: Mapping[int, str]) -> Iterator[str]:
    """Yields the activity that takes most of the time, and the worker that delays the others."""
    waited: dict[int, float] = {}
    for spent in times:
        for (awaited, _), time in spent.waiting.items():
            waited[awaited] = waited.get(awaited, 0.0) + time
    parts = {
        "computing": sum(spent.computing for spent in times),
        "sending and receiving": sum(spent.sending for spent in times),
        "reading data": sum(spent.reading for spent in times),
        "waiting for each other": sum(waited.values()),
    }
    most = max(parts, key=lambda kind: parts[kind])
    yield f"most of all workers' time is {most}: {_part(parts[most], sum(spent.took for spent in times))}"
    if most == "waiting for each other":
        awaited = max(waited, key=lambda worker: waited[worker])
        yield f"delayed most by {_name(awaited, names)}, for which the others wait {_time(waited[awaited])} together"


def _name(worker: int, names: Mapping[int, str]) -> str:
    return "another worker" if worker == ANYBODY else names.get(worker, f"worker {worker}")


def _time(microseconds: float) -> str:
    return readable_seconds(microseconds / 1e6)


def _part(part: float, whole: float, between: str = " ") -> str:
    return f"{_time(part)}{between}({part / whole:.0%})" if part else "–"


def merged(traces: Mapping[str, Sequence[Trace]]) -> dict[str, Any]:
    """Returns the content of the merged file.

    Args:
        traces: the traces of all workers, by step.
    """
    everything = [trace for step in traces.values() for trace in step]
    origin = min(trace.begin for trace in everything)
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(everything, origin))}


def _events(traces: Sequence[Trace], origin: float) -> Iterator[dict[str, Any]]:
    """Yields events with times in microseconds after the first one."""
    names = worker_names(traces)
    lanes: dict[tuple[int, str], int] = {}
    tasks = sorted({event.task for trace in traces for event in trace.events})
    for task in tasks:
        process = {"name": names.get(task, f"worker {task}")}
        yield {"ph": "M", "name": "process_name", "pid": task, "tid": 0, "args": process}
        yield {"ph": "M", "name": "process_sort_index", "pid": task, "tid": 0, "args": {"sort_index": task}}
    for trace in traces:
        for event in trace.events:
            lane = _lane(trace, event)
            if (event.task, lane) not in lanes:
                lanes[event.task, lane] = tid = len(lanes) + 1
                yield {"ph": "M", "name": "thread_name", "pid": event.task, "tid": tid, "args": {"name": lane}}
            yield {
                "ph": "X", "pid": event.task, "tid": lanes[event.task, lane], "cat": kind_of(event),
                "ts": round(event.start - origin, 3), "dur": event.length, "name": _event_name(event),
                "args": {"label": event.label, "step": trace.step, "of worker": trace.worker},
            }  # fmt: skip


def _lane(trace: Trace, event: Event) -> str:
    """Returns the lane of an event; work for another worker's step has a lane of its own."""
    of = "" if event.task == trace.worker else f", for worker {trace.worker}"
    return f"{trace.step}{of}: {event.device} {event.lane}"


def _event_name(event: Event) -> str:
    if event.transfer is None:
        return event.name
    return f"receives {event.transfer.tensor} from worker {event.transfer.source}"
