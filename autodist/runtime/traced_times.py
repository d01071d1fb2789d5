"""The times that a worker computes, sends and waits in a step, from TensorFlow's statistics of one traced run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autodist.runtime.intervals import length, minus, union

_OPERATION = re.compile(r" = (\w+)\(")
_TASK = re.compile(r"/task:(\d+)")
_TRANSFER = re.compile(r"\[[\d.]+[KMGT]?B\] .* from \S+ to \S+")

_READS_DATA = re.compile(r"Iterator.*GetNext|.*Dataset")
_COLLECTIVE = re.compile(r"Collective")
_BLOCKS = re.compile(r"Queue\w*Dequeue|Barrier|\w*TakeGradient|\w*Recv\Z")


def kind_of_operation(operation: str) -> str:
    """Returns "reading", "collective", "waiting" or "computing" for a type of operation."""
    if _READS_DATA.match(operation):
        return "reading"
    if _COLLECTIVE.match(operation):
        return "collective"
    return "waiting" if _BLOCKS.match(operation) else "computing"


def operation_of(label: str) -> str:
    """Returns the type of the operation in TensorFlow's description of a node; "" if there is none."""
    found = _OPERATION.search(label)
    return found[1] if found else ""


def task_of(device: str, default: int = 0) -> int:
    """Returns the index of the worker in the name of a device."""
    found = _TASK.search(device)
    return int(found[1]) if found else default


@dataclass(frozen=True)
class TracedTimes:
    """Wall-clock seconds of one worker in one step. At each moment the first of the activities counts.

    Attributes:
        whole: the step, from its first operation to its last.
        compute: an operation computes in the worker's process.
        send: a tensor that the step itself transfers is on its way, or a collective is in progress.
        wait: an operation waits for a message of another worker.
    """

    whole: float
    compute: float
    send: float
    wait: float

    @classmethod
    def of(cls, step_stats: Any, worker: int) -> TracedTimes | None:
        """Returns the times in a run's `StepStats`; None if it has no operation of this worker."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for device in step_stats.dev_stats:
            if task_of(device.device, worker) == worker:
                for node in device.node_stats:
                    start = node.all_start_nanos or 1000 * node.all_start_micros
                    span = (start, start + (node.all_end_rel_nanos or 1000 * node.all_end_rel_micros))
                    spans.setdefault(_kind_of(node.timeline_label), []).append(span)
        if not spans:
            return None
        everything = [span for kind in spans.values() for span in kind]
        compute = union(spans.get("computing", ()))
        send = minus(union(_all(spans, "transfer", "collective")), compute)
        wait = minus(union(spans.get("waiting", ())), union([*compute, *send]))
        whole = max(end for _, end in everything) - min(start for start, _ in everything)
        return cls(*(nanoseconds / 1e9 for nanoseconds in (whole, length(compute), length(send), length(wait))))


def _all(spans: dict[str, list[tuple[float, float]]], *kinds: str) -> Iterable[tuple[float, float]]:
    return (span for kind in kinds for span in spans.get(kind, ()))


def _kind_of(label: str) -> str:
    return "transfer" if _TRANSFER.match(label) else kind_of_operation(operation_of(label))
