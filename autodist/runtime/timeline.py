"""Timeline: what ran when in one step, in a file that chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import atexit
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist.errors import TraceError
from autodist.graph.imported import ImportedGraph
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

TRACE_VARIABLE = "AUTODIST_TRACE"
"""Environment variable that names a folder. There each worker writes what ran when in the tenth run of each of its
steps, as `step_1.worker_0.json`: on which device, how long, and what was sent to other workers. Set it where the chief
starts; the other workers have it from there. What stands on another machine is told by that machine's clock, and how
far the worker's own is ahead of the chief's stands beside it. Steps take a little longer while it is set, and the tenth
much longer."""

TRACED_RUN = 10
"""By now TensorFlow has placed and optimized the step, and its memory is there."""


def trace_file(step: str, worker: int) -> pathlib.Path | None:
    """Where the trace of a step goes; None if nobody asked for one.

    Raises:
        TraceError: it cannot go there, which is told before the first step and not in the tenth.
    """
    told = os.environ.get(TRACE_VARIABLE)
    if not told:
        return None
    folder = pathlib.Path(told)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "may not be written by this process" if there.is_dir() else "is no folder"
        raise TraceError(f"{TRACE_VARIABLE}={told}: no trace can be written there, since {there} {reason}.")
    return folder / f"{step}.worker_{worker}.json"


_counts: dict[pathlib.Path, int] = {}
"""How often each step of this process ran, by the file of its trace."""


def _tell_if_nothing_was_traced() -> None:
    file = max(_counts, key=lambda file: _counts[file])
    if _counts[file] < TRACED_RUN:
        told = "%s=%s: nothing was traced, since the tenth run of a step is, and none ran as often (%s: %d times)"
        log.warning(told, TRACE_VARIABLE, file.parent, file.name, _counts[file], extra=ALIKE_EVERYWHERE)


@dataclass
class TracedRuns:
    """Runs a step, and writes a trace of its tenth run.

    Attributes:
        run: takes the step's inputs, `options` and `run_metadata`.
        options: of every run.
        file: where the trace goes.
        queues: gives, by the name of an operation on a queue, the name by which all workers know that queue.
        about: gives what is known besides, right after the run.
    """

    run: Callable[..., Any]
    options: tf.compat.v1.RunOptions
    file: pathlib.Path
    queues: Callable[[], Mapping[str, str]] = dict
    about: Callable[[], Mapping[str, Any]] = dict
    _count: int = 0

    def __post_init__(self) -> None:
        if not _counts:
            atexit.register(_tell_if_nothing_was_traced)
        _counts[self.file] = 0

    def __call__(self, *values: Any) -> Any:
        self._count += 1
        _counts[self.file] = self._count
        if self._count != TRACED_RUN:
            return self.run(*values, options=self.options)
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        options.MergeFrom(self.options)
        metadata = tf.compat.v1.RunMetadata()
        result = self.run(*values, options=options, run_metadata=metadata)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        events = list(_events(metadata.step_stats, self.queues()))
        self.file.write_text(json.dumps({"traceEvents": events, "otherData": dict(self.about())}))
        log.info("%s: what ran when in step %d", self.file, TRACED_RUN)
        return result


def shared_queues(graph: ImportedGraph) -> dict[str, str]:
    """By the name of each operation on a queue, the name by which all workers know that queue."""
    found = {}
    graph.make_operations()
    for op in graph.get_operations():
        if op.type.startswith("Queue") and op.inputs:
            queue = op.inputs[0].op
            found[op.name] = queue.get_attr("shared_name").decode() or queue.name
    return found


def _events(stats: Any, queues: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The events of Chrome's trace format: a process for each device, a thread for what ran there at one time."""
    by_device: dict[str, list[Any]] = {}
    for device in stats.dev_stats:
        by_device.setdefault(device.device, []).extend(device.node_stats)
    for pid, (name, nodes) in enumerate(sorted(by_device.items())):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        free_at: list[float] = []  # by thread
        for node in sorted(nodes, key=lambda n: n.all_start_micros):
            start, length = _when(node)
            tid = next((k for k, end in enumerate(free_at) if end <= start), len(free_at))
            free_at[tid : tid + 1] = [start + length]
            told = {"label": node.timeline_label}
            if node.node_name in queues:
                told["queue"] = queues[node.node_name]
            yield {
                "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length,
                "name": node.node_name, "cat": "op", "args": told,
            }  # fmt: skip


def _when(node: Any) -> tuple[float, float]:
    """Start and length in microseconds. What moves tensors is noted in these alone, all else in nanoseconds as well."""
    if node.all_start_nanos:
        return node.all_start_nanos / 1000, node.all_end_rel_nanos / 1000
    return float(node.all_start_micros), float(node.all_end_rel_micros)
