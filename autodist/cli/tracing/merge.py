"""All workers' traces as one, in Chrome's trace format, which Perfetto reads: a process for each worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autodist.cli.tracing.files import Event, Trace
from autodist.cli.tracing.spent import kind_of
from autodist.cli.tracing.words import worker_names


def merged(traces: Mapping[str, Sequence[Trace]]) -> dict[str, Any]:
    """What goes into the file.

    Args:
        traces: of all workers, by step.
    """
    everything = [trace for step in traces.values() for trace in step]
    origin = min(trace.begin for trace in everything)
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(everything, origin))}


def _events(traces: Sequence[Trace], origin: float) -> Iterator[dict[str, Any]]:
    """In microseconds from the first event on."""
    names = worker_names(traces)
    lanes: dict[tuple[int, str], int] = {}
    tasks = sorted({event.task for trace in traces for event in trace.events})
    for task in tasks:
        told = {"name": names.get(task, f"worker {task}")}
        yield {"ph": "M", "name": "process_name", "pid": task, "tid": 0, "args": told}
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
    """Where an event stands: what one worker's step does at another one stands there by itself."""
    of = "" if event.task == trace.worker else f", for worker {trace.worker}"
    return f"{trace.step}{of}: {event.device} {event.lane}"


def _name(event: Event) -> str:
    if event.transfer is None:
        return event.name
    return f"receives {event.transfer.tensor} from worker {event.transfer.source}"
