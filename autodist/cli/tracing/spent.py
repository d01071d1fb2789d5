"""Where a worker's time goes in a step: computing, sending, waiting for whom.

At each moment the first of these counts that is so: an operation computes in the worker's process; a tensor is on its
way to or from it; it waits for a batch; it waits for another worker, of several for the one that lets it wait longest.
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autodist.cli.tracing.files import Event, Trace, TracedTransfer
from autodist.cli.tracing.intervals import Intervals, end_of_stretch, length, minus, overlap, union, within

ANYBODY = -1
"""In place of a worker's index, where it is not known which one was waited for."""

_READS_DATA = re.compile(r"Iterator.*GetNext|.*Dataset")
_COLLECTIVE = re.compile(r"Collective")
_BLOCKS = re.compile(r"Queue\w*Dequeue|Barrier|\w*TakeGradient|\w*Recv\Z")


class Meanwhile(enum.Enum):
    """What a worker did while another one waited for it."""

    ABSENT = "had not begun the step: see what its script does before it"
    COMPUTING = "computed"
    SENDING = "sent and received"
    ELSE = "was at something that the traces do not show"


@dataclass(frozen=True)
class Stretches:
    """What one worker did when, in one step. The first that is so of a moment is what counts.

    Attributes:
        trace: of that step.
        computing: in its process.
        sending: or receiving, while it computed nothing.
        reading: data, while it did none of these.
        waiting: meanwhile, by whom it waited for; for several at a time, maybe.
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
        """For whom it waits then, and until when."""
        ends = {whom: end_of_stretch(stretches, moment) for whom, stretches in self.waiting.items()}
        return {whom: end for whom, end in ends.items() if end is not None}


@dataclass(frozen=True)
class TimeSpent:
    """Where one worker's time went, in one step. Times are in microseconds.

    Attributes:
        trace: of that step.
        computing: in its process.
        sending: or receiving, while it computed nothing.
        reading: data, while it did none of these.
        waiting: by the index of the worker that it waited for in the end, and by what that one did meanwhile: where
            that one waited itself, for whomever that one waited for.
        sent: bytes to other workers, by their index.
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
        """In which nothing of it was seen: TensorFlow between two operations, or what is not traced."""
        return max(0.0, self.took - self.computing - self.sending - self.reading - self.waited)


def time_spent(traces: Sequence[Trace]) -> list[TimeSpent]:
    """Where the time of each worker goes, in one step of all."""
    step = _Step(traces)
    stretches = {trace.worker: _stretches(trace, step) for trace in traces}
    return [_spent(one, stretches, step) for one in stretches.values()]


def kind_of(event: Event) -> str:
    """computing, transfer, reading or waiting."""
    if event.transfer is not None:
        return "transfer"
    if _READS_DATA.match(event.operation):
        return "reading"
    return "waiting" if _BLOCKS.match(event.operation) or _COLLECTIVE.match(event.operation) else "computing"


class _Step:
    """What all workers' traces of one step say together."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.moved: list[tuple[float, Event]] = []
        self._fills: dict[str, list[tuple[float, int]]] = {}
        self._came: dict[str, list[tuple[float, int]]] = {}
        for trace in traces:
            made = {(event.task, event.name): event.end for event in trace.events if event.transfer is None}
            for event in trace.events:
                if event.transfer is not None:
                    self.moved.append((_on_its_way(event, made), event))
                elif event.queue is not None and "Enqueue" in event.operation:
                    self._fills.setdefault(event.queue, []).append((event.start, trace.worker))
                elif _COLLECTIVE.match(event.operation):
                    self._came.setdefault(event.name, []).append((event.start, trace.worker))

    def moved_by(self, worker: int) -> Iterator[tuple[float, Event, TracedTransfer]]:
        """What was on its way to or from a worker, and since when."""
        for since, event in self.moved:
            moved = event.transfer
            if moved is not None and moved.source != moved.target and worker in (moved.source, moved.target):
                yield since, event, moved

    def who_filled(self, event: Event, worker: int) -> int:
        """Who put in what a worker waited for: of all that filled the queue by then, the last."""
        filled = [fill for fill in self._fills.get(event.queue or "", ()) if fill[1] != worker]
        by_then = [fill for fill in filled if fill[0] <= event.end]
        return max(by_then)[1] if by_then else min(filled)[1] if filled else ANYBODY

    def last_to_come(self, event: Event, worker: int) -> tuple[float, int]:
        """When, and with which other worker, all had come to a collective that a worker waited in."""
        came = [one for one in self._came.get(event.name, ()) if one[1] != worker]
        last, whom = max(came, default=(event.end, ANYBODY))
        return min(max(last, event.start), event.end), whom


def _on_its_way(event: Event, made: Mapping[tuple[int, str], float]) -> float:
    """Since when a tensor was on its way: it is asked for before it is made."""
    assert event.transfer is not None, "it is one"
    return min(max(event.start, made.get((event.transfer.source, event.transfer.tensor), event.start)), event.end)


def _stretches(trace: Trace, step: _Step) -> Stretches:
    mine = [event for event in trace.events if event.task == trace.worker]
    taken: Intervals = []
    found = []
    for stretches in (
        [(event.start, event.end) for event in mine if kind_of(event) == "computing"],
        list(_sending(trace, step)),
        [(event.start, event.end) for event in mine if kind_of(event) == "reading"],
    ):
        found.append(minus(within(union(stretches), trace.begin, trace.end), taken))
        taken = union([*taken, *found[-1]])
    waits: dict[int, list[tuple[float, float]]] = {}
    for start, end, whom in _waits(trace, step):
        waits.setdefault(whom, []).append((start, end))
    waiting = {whom: minus(within(union(them), trace.begin, trace.end), taken) for whom, them in waits.items()}
    computing, sending, reading = found
    return Stretches(trace, computing, sending, reading, waiting)


def _spent(mine: Stretches, everybody: Mapping[int, Stretches], step: _Step) -> TimeSpent:
    worker = mine.trace.worker
    waiting: dict[tuple[int, Meanwhile], float] = {}
    for start, end in _moments(mine, everybody.values()):
        whom = _held_up_by(worker, start, everybody)
        for meanwhile, time in _meanwhile((start, end), everybody.get(whom)):
            waiting[whom, meanwhile] = waiting.get((whom, meanwhile), 0.0) + time
    sent: dict[int, int] = {}
    for _, _, moved in step.moved_by(worker):
        if moved.source == worker:
            sent[moved.target] = sent.get(moved.target, 0) + moved.bytes
    return TimeSpent(mine.trace, length(mine.computing), length(mine.sending), length(mine.reading), waiting, sent)


def _moments(mine: Stretches, everybody: Iterable[Stretches]) -> Iterator[tuple[float, float]]:
    """When one worker waits, in pieces within which nobody begins or ends to wait."""
    cuts = sorted({cut for one in everybody for them in one.waiting.values() for stretch in them for cut in stretch})
    for start, end in mine.all_waiting:
        inner = cuts[bisect.bisect_right(cuts, start) : bisect.bisect_left(cuts, end)]
        yield from ((a, b) for a, b in itertools.pairwise([start, *inner, end]) if a < b)


def _held_up_by(worker: int, moment: float, everybody: Mapping[int, Stretches]) -> int:
    """For whom a worker waits in the end: one that waits for nobody itself; of several, the one that is last."""
    first = everybody[worker].waited_for(moment)
    asked, seen, found = [worker], {worker}, dict[int, float]()
    while asked:
        for whom, end in everybody[asked.pop()].waited_for(moment).items():
            if whom not in seen:
                seen.add(whom)
                if whom in everybody and everybody[whom].waited_for(moment):
                    asked.append(whom)
                else:
                    found[whom] = end
    last = found or first  # all wait for one another: what they wait for is under way, unseen
    return max(last, key=lambda whom: last[whom])


def _meanwhile(stretch: tuple[float, float], other: Stretches | None) -> Iterator[tuple[Meanwhile, float]]:
    """What the one that is waited for did."""
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
    """When something was on its way to or from a worker."""
    for since, event, _ in step.moved_by(trace.worker):
        yield since, event.end
    for event in trace.events:
        if event.task == trace.worker and _COLLECTIVE.match(event.operation):
            yield step.last_to_come(event, trace.worker)[0], event.end


def _waits(trace: Trace, step: _Step) -> Iterator[tuple[float, float, int]]:
    """From when to when a worker had to wait for another one, which may have been at work for it."""
    for since, event, moved in step.moved_by(trace.worker):
        if moved.target == trace.worker:
            yield event.start, since, moved.source
    for event in trace.events:
        if event.transfer is not None:
            continue
        if event.task != trace.worker:
            if event.queue is None:
                yield event.start, event.end, event.task  # something of its step that another worker computes
        elif _COLLECTIVE.match(event.operation):
            until, whom = step.last_to_come(event, trace.worker)
            yield event.start, until, whom
        elif kind_of(event) == "waiting":
            yield event.start, event.end, step.who_filled(event, trace.worker)
