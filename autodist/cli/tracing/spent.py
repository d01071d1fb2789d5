"""Computes how a worker spends its time in a step: computing, sending, reading, or waiting for another worker.

At each moment one activity counts, the first of these: an operation computes in the worker's process; a tensor is in
transfer to or from it; it waits for a batch; it waits for another worker. Of several awaited workers, the one with the
longest wait counts.
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autodist.cli.tracing.files import Event, Trace, TracedTransfer
from autodist.runtime.intervals import Intervals, end_of_stretch, length, minus, overlap, union, within
from autodist.runtime.traced_times import kind_of_operation

ANYBODY = -1
"""Worker index for a wait whose cause is not known."""


class Meanwhile(enum.Enum):
    """The activity of a worker while another one waited for it."""

    ABSENT = "had not begun the step: check the work of its script before the step"
    COMPUTING = "computed"
    SENDING = "sent and received"
    ELSE = "did work that the traces do not show"


@dataclass(frozen=True)
class Stretches:
    """The intervals of one worker's activities in one step. At each moment only the first activity counts.

    Attributes:
        trace: the worker's trace of the step.
        computing: operations run in its process.
        sending: it sends or receives, and does not compute.
        reading: it waits for a batch, and does none of the above.
        waiting: it does none of the above, and waits for another worker; by that worker. Several waits may overlap.
    """

    trace: Trace
    computing: Intervals
    sending: Intervals
    reading: Intervals
    waiting: Mapping[int, Intervals]

    @functools.cached_property
    def all_waiting(self) -> Intervals:
        return union(stretch for stretches in self.waiting.values() for stretch in stretches)

    def waited_for(self, moment: float) -> dict[int, float]:
        """Returns the workers that it waits for at a time, with the end of each wait."""
        ends = {awaited: end_of_stretch(stretches, moment) for awaited, stretches in self.waiting.items()}
        return {awaited: end for awaited, end in ends.items() if end is not None}


@dataclass(frozen=True)
class TimeSpent:
    """The times that one worker spent on its activities in one step, in microseconds.

    Attributes:
        trace: the worker's trace of the step.
        computing: operations run in its process.
        sending: it sends or receives, and does not compute.
        reading: it waits for a batch, and does none of the above.
        waiting: it waits for another worker; by the worker at the end of the chain of waits (if the awaited worker
            waits too, the one that it waits for), and by that worker's activity.
        sent: the bytes sent to other workers, by their index.
    """

    trace: Trace
    computing: float
    sending: float
    reading: float
    waiting: Mapping[tuple[int, Meanwhile], float] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)

    @property
    def took(self) -> float:
        return self.trace.end - self.trace.begin

    @property
    def waited(self) -> float:
        return sum(self.waiting.values())

    @property
    def rest(self) -> float:
        """Time without any traced activity: TensorFlow between two operations, or work that is not traced."""
        return max(0.0, self.took - self.computing - self.sending - self.reading - self.waited)


def time_spent(traces: Sequence[Trace]) -> list[TimeSpent]:
    """Returns the times that each worker spent in one step, from the traces of all workers."""
    step = _Step(traces)
    stretches = {trace.worker: _stretches(trace, step) for trace in traces}
    return [_spent(one, stretches, step) for one in stretches.values()]


def kind_of(event: Event) -> str:
    """Returns "computing", "transfer", "reading" or "waiting"."""
    if event.transfer is not None:
        return "transfer"
    kind = kind_of_operation(event.operation)
    return "waiting" if kind == "collective" else kind


class _Step:
    """Combines all workers' traces of one step."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.moved: list[tuple[float, Event]] = []
        self._fills: dict[str, list[tuple[float, int]]] = {}
        self._arrivals: dict[str, list[tuple[float, int]]] = {}
        for trace in traces:
            made = {(event.task, event.name): event.end for event in trace.events if event.transfer is None}
            for event in trace.events:
                if event.transfer is not None:
                    self.moved.append((_transfer_start(event, made), event))
                elif event.queue is not None and "Enqueue" in event.operation:
                    self._fills.setdefault(event.queue, []).append((event.start, trace.worker))
                elif kind_of_operation(event.operation) == "collective":
                    self._arrivals.setdefault(event.name, []).append((event.start, trace.worker))

    def moved_by(self, worker: int) -> Iterator[tuple[float, Event, TracedTransfer]]:
        """Yields the transfers to or from a worker, with their start times."""
        for since, event in self.moved:
            moved = event.transfer
            if moved is not None and moved.source != moved.target and worker in (moved.source, moved.target):
                yield since, event, moved

    def queue_filler(self, event: Event, worker: int) -> int:
        """Returns the last worker that filled a queue before `worker` stopped waiting for it."""
        filled = [fill for fill in self._fills.get(event.queue or "", ()) if fill[1] != worker]
        by_then = [fill for fill in filled if fill[0] <= event.end]
        return max(by_then)[1] if by_then else min(filled)[1] if filled else ANYBODY

    def last_arrival(self, event: Event, worker: int) -> tuple[float, int]:
        """Returns when the last other worker arrived at a collective, and that worker."""
        arrivals = [one for one in self._arrivals.get(event.name, ()) if one[1] != worker]
        last, awaited = max(arrivals, default=(event.end, ANYBODY))
        return min(max(last, event.start), event.end), awaited


def _transfer_start(event: Event, made: Mapping[tuple[int, str], float]) -> float:
    """Returns the start time of a transfer: it is requested before the tensor is computed."""
    assert event.transfer is not None, "the event is a transfer"
    return min(max(event.start, made.get((event.transfer.source, event.transfer.tensor), event.start)), event.end)


def _stretches(trace: Trace, step: _Step) -> Stretches:
    own = [event for event in trace.events if event.task == trace.worker]
    taken: Intervals = []
    found = []
    for stretches in (
        [(event.start, event.end) for event in own if kind_of(event) == "computing"],
        list(_sending(trace, step)),
        [(event.start, event.end) for event in own if kind_of(event) == "reading"],
    ):
        found.append(minus(within(union(stretches), trace.begin, trace.end), taken))
        taken = union([*taken, *found[-1]])
    waits: dict[int, list[tuple[float, float]]] = {}
    for start, end, awaited in _waits(trace, step):
        waits.setdefault(awaited, []).append((start, end))
    waiting = {awaited: minus(within(union(them), trace.begin, trace.end), taken) for awaited, them in waits.items()}
    computing, sending, reading = found
    return Stretches(trace, computing, sending, reading, waiting)


def _spent(own: Stretches, everybody: Mapping[int, Stretches], step: _Step) -> TimeSpent:
    worker = own.trace.worker
    waiting: dict[tuple[int, Meanwhile], float] = {}
    for start, end in _moments(own, everybody.values()):
        awaited = _awaited_at_end(worker, start, everybody)
        for meanwhile, time in _meanwhile((start, end), everybody.get(awaited)):
            waiting[awaited, meanwhile] = waiting.get((awaited, meanwhile), 0.0) + time
    sent: dict[int, int] = {}
    for _, _, moved in step.moved_by(worker):
        if moved.source == worker:
            sent[moved.target] = sent.get(moved.target, 0) + moved.bytes
    return TimeSpent(own.trace, length(own.computing), length(own.sending), length(own.reading), waiting, sent)


def _moments(own: Stretches, everybody: Iterable[Stretches]) -> Iterator[tuple[float, float]]:
    """Yields the waits of one worker, split where the wait of any worker begins or ends."""
    cuts = sorted({cut for one in everybody for them in one.waiting.values() for stretch in them for cut in stretch})
    for start, end in own.all_waiting:
        inner = cuts[bisect.bisect_right(cuts, start) : bisect.bisect_left(cuts, end)]
        yield from ((a, b) for a, b in itertools.pairwise([start, *inner, end]) if a < b)


def _awaited_at_end(worker: int, moment: float, everybody: Mapping[int, Stretches]) -> int:
    """Returns the worker at the end of the chain of waits; of several, the one that is waited for longest."""
    first = everybody[worker].waited_for(moment)
    pending, seen, found = [worker], {worker}, dict[int, float]()
    while pending:
        for awaited, end in everybody[pending.pop()].waited_for(moment).items():
            if awaited not in seen:
                seen.add(awaited)
                if awaited in everybody and everybody[awaited].waited_for(moment):
                    pending.append(awaited)
                else:
                    found[awaited] = end
    last = found or first  # all wait for each other: the transfer of their data was not traced
    return max(last, key=lambda awaited: last[awaited])


def _meanwhile(stretch: tuple[float, float], other: Stretches | None) -> Iterator[tuple[Meanwhile, float]]:
    """Yields the activities of the awaited worker, with their durations."""
    rest: Intervals = [stretch]
    if other is not None:
        begin = other.trace.begin
        for meanwhile, stretches in (
            (Meanwhile.ABSENT, [(min(stretch[0], begin), begin)]),
            (Meanwhile.COMPUTING, other.computing),
            (Meanwhile.SENDING, other.sending),
        ):
            both = overlap(rest, union(stretches))
            if both:
                yield meanwhile, length(both)
                rest = minus(rest, both)
    if rest:
        yield Meanwhile.ELSE, length(rest)


def _sending(trace: Trace, step: _Step) -> Iterator[tuple[float, float]]:
    """Yields the intervals of transfers to or from a worker."""
    for since, event, _ in step.moved_by(trace.worker):
        yield since, event.end
    for event in trace.events:
        if event.task == trace.worker and kind_of_operation(event.operation) == "collective":
            yield step.last_arrival(event, trace.worker)[0], event.end


def _waits(trace: Trace, step: _Step) -> Iterator[tuple[float, float, int]]:
    """Yields the intervals in which a worker waited for another one, and that worker."""
    for since, event, moved in step.moved_by(trace.worker):
        if moved.target == trace.worker:
            yield event.start, since, moved.source
    for event in trace.events:
        if event.transfer is not None:
            continue
        if event.task != trace.worker:
            if event.queue is None:
                yield event.start, event.end, event.task  # part of its step on another worker
        elif kind_of_operation(event.operation) == "collective":
            until, awaited = step.last_arrival(event, trace.worker)
            yield event.start, until, awaited
        elif kind_of(event) == "waiting":
            yield event.start, event.end, step.queue_filler(event, trace.worker)
