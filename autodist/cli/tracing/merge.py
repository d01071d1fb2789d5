"""Merges all workers' traces into one in Chrome's trace format for Perfetto, with a process for each worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autodist.cli.tracing.files import Event, Trace
from autodist.cli.tracing.spent import kind_of
from autodist.cli.tracing.summary import worker_names


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
                "ts": round(event.start - origin, 3), "dur": event.length, "name": _name(event),
                "args": {"label": event.label, "step": trace.step, "of worker": trace.worker},
            }  # fmt: skip


def _lane(trace: Trace, event: Event) -> str:
    """Returns the lane of an event; work for another worker's step has a lane of its own."""
    of = "" if event.task == trace.worker else f", for worker {trace.worker}"
    return f"{trace.step}{of}: {event.device} {event.lane}"


def _name(event: Event) -> str:
    if event.transfer is None:
        return event.name
    return f"receives {event.transfer.tensor} from worker {event.transfer.source}"
