"""Timeline of one step, in a file for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import atexit
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from autodist.errors import TraceError
from autodist.graph.imported import ImportedGraph
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

TRACE_VARIABLE = "AUTODIST_TRACE"
"""Environment variable with the path of a folder for traces.

Each worker writes a timeline of the tenth run of each of its steps there, as `step_1.worker_0.json`: the operations
with their devices and durations, and transfers to other workers. Set it for the chief; the other workers inherit it.
Times are by the clock of each machine; the file has the offset of the worker's clock from the chief's. Steps are
slightly slower while it is set, and the tenth is much slower."""

TRACED_RUN = 10
"""The run to trace: TensorFlow has placed and optimized the step by then, and allocated its memory."""


@dataclass(frozen=True)
class TraceFile:
    """The file for the trace of a step.

    Attributes:
        path: its path.
        about: metadata of the step that is written beside the trace.
    """

    path: pathlib.Path
    about: Mapping[str, Any] = field(default_factory=dict)


def trace_file(step: str, worker: int, about: Mapping[str, Any]) -> TraceFile | None:
    """Returns the file for the trace of a step; None if tracing is disabled.

    Args:
        step: name of the step.
        worker: index of this worker.
        about: metadata of the step.

    Raises:
        TraceError: the file cannot be written; raised before the first step rather than in the tenth.
    """
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return None
    folder = pathlib.Path(path)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "may not be written by this process" if existing.is_dir() else "is no folder"
        raise TraceError(f"{TRACE_VARIABLE}={path}: no trace can be written there, since {existing} {reason}.")
    return TraceFile(folder / f"{step}.worker_{worker}.json", about)


_counts: dict[pathlib.Path, int] = {}
"""Number of runs of each step, by the file of the trace."""


def _warn_if_nothing_was_traced() -> None:
    file = max(_counts, key=lambda file: _counts[file])
    if _counts[file] < TRACED_RUN:
        message = "%s=%s: nothing was traced, since the tenth run of a step is, and none ran as often (%s: %d times)"
        log.warning(message, TRACE_VARIABLE, file.parent, file.name, _counts[file], extra=ALIKE_EVERYWHERE)


@dataclass
class TracedRuns:
    """Runs a step, and writes a trace of its tenth run.

    Attributes:
        run: called with the step's inputs, `options` and `run_metadata`.
        options: options of every run.
        file: the file of the trace.
        queues: returns the shared names of queues, by the names of the operations on them.
        about: returns metadata of this worker, right after the run.
    """

    run: Callable[..., Any]
    options: tf.compat.v1.RunOptions
    file: TraceFile
    queues: Callable[[], Mapping[str, str]] = dict
    about: Callable[[], Mapping[str, Any]] = dict
    _count: int = 0

    def __post_init__(self) -> None:
        if not _counts:
            atexit.register(_warn_if_nothing_was_traced)
        _counts[self.file.path] = 0

    def __call__(self, *values: Any) -> Any:
        self._count += 1
        _counts[self.file.path] = self._count
        if self._count != TRACED_RUN:
            return self.run(*values, options=self.options)
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        options.MergeFrom(self.options)
        metadata = tf.compat.v1.RunMetadata()
        result = self.run(*values, options=options, run_metadata=metadata)
        self.file.path.parent.mkdir(parents=True, exist_ok=True)
        events = list(_events(metadata.step_stats, self.queues()))
        self.file.path.write_text(json.dumps({"traceEvents": events, "otherData": {**self.about(), **self.file.about}}))
        log.info("%s: timeline of step %d", self.file.path, TRACED_RUN)
        return result


def shared_queues(graph: ImportedGraph) -> dict[str, str]:
    """Returns the shared name of the queue of each queue operation, by the operation's name."""
    names = {}
    graph.make_operations()
    for op in graph.get_operations():
        if op.type.startswith("Queue") and op.inputs:
            queue = op.inputs[0].op
            names[op.name] = queue.get_attr("shared_name").decode() or queue.name
    return names


def _events(stats: Any, queues: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yields events in Chrome's trace format: a process per device, a thread per concurrent operation."""
    by_device: dict[str, list[Any]] = {}
    for device in stats.dev_stats:
        by_device.setdefault(device.device, []).extend(device.node_stats)
    for pid, (name, nodes) in enumerate(sorted(by_device.items())):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        free_at: list[float] = []  # by thread
        for node in sorted(nodes, key=lambda n: n.all_start_micros):
            start, length = start_and_length(node)
            tid = next((k for k, end in enumerate(free_at) if end <= start), len(free_at))
            free_at[tid : tid + 1] = [start + length]
            args = {"label": node.timeline_label}
            if node.node_name in queues:
                args["queue"] = queues[node.node_name]
            yield {
                "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length,
                "name": node.node_name, "cat": "op", "args": args,
            }  # fmt: skip


def start_and_length(node: Any) -> tuple[float, float]:
    """Returns start and length of a node, in microseconds; TensorFlow records transfers without nanoseconds."""
    if node.all_start_nanos:
        return node.all_start_nanos / 1000, node.all_end_rel_nanos / 1000
    return float(node.all_start_micros), float(node.all_end_rel_micros)
