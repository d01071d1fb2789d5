"""A model of the messages of a run: programs that put messages into bounded queues and take them from there.

A worker's steps, its background updates, its standing program and the loop of each of its inboxes are programs. A
program has runs, one after another. A run has events, each of which starts when earlier events of the run have ended
and its queues have a message or a place.

If each queue has one source and one reader, no event can prevent another one (a *marked graph*). The circuits of the
graph then decide about all orders of the events and about any number of steps: `faults_of`. A lock has several sources
and readers; `explore` tries the orders in which they take it.

Source: F. Commoner et al., "Marked Directed Graphs", Journal of Computer and System Sciences 5, 1971.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Event:
    """A node of a program that takes messages, then puts messages.

    Attributes:
        name: of the node.
        takes: queues.
        puts: queues.
        after: positions of all events of the same run that end before this one starts.
    """

    name: str
    takes: tuple[str, ...] = ()
    puts: tuple[str, ...] = ()
    after: frozenset[int] = frozenset()


Run = tuple[Event, ...]


@dataclass(frozen=True)
class Queue:
    """A queue, and the number of messages in it before the first step."""

    capacity: int
    initial: int = 0
    is_lock: bool = False


class At(NamedTuple):
    """An event of a program, by its position; the positions -1 and the number of events are the run's start and end."""

    program: str
    run: int
    position: int


@dataclass(frozen=True)
class Transfers:
    """Programs and their queues.

    Attributes:
        programs: the runs of one round of each program, by name. A round is one step, or several different steps.
        queues: by name.
        loops: maps each inbox to the outbox from which an endless loop moves its messages.
        released: maps a program to the one whose run of the same number starts earlier.
    """

    programs: Mapping[str, tuple[Run, ...]]
    queues: Mapping[str, Queue]
    loops: Mapping[str, str] = field(default_factory=dict)
    released: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def channels(self) -> dict[str, str]:
        """Maps each queue that a program takes messages from to the queue that a program puts them into; no locks."""
        outboxes = set(self.loops.values())
        names = (name for name, queue in self.queues.items() if name not in outboxes and not queue.is_lock)
        return {name: self.loops.get(name, name) for name in names}

    @cached_property
    def puts(self) -> dict[str, list[At]]:
        """The events that put into each queue in one round, in order."""
        return self._ends(lambda event: event.puts)

    @cached_property
    def takes(self) -> dict[str, list[At]]:
        """The events that take from each queue in one round, in order."""
        return self._ends(lambda event: event.takes)

    def _ends(self, queues_of: Callable[[Event], Iterable[str]]) -> dict[str, list[At]]:
        found: dict[str, list[At]] = {name: [] for name in self.queues}
        for at, event in self.events():
            for name in queues_of(event):
                found[name].append(at)
        return found

    def events(self) -> Iterator[tuple[At, Event]]:
        for program, runs in self.programs.items():
            for number, run in enumerate(runs):
                yield from ((At(program, number, k), event) for k, event in enumerate(run))

    def name_of(self, at: At) -> str:
        run = self.programs[at.program][at.run]
        what = "start" if at.position < 0 else "end" if at.position == len(run) else run[at.position].name
        return f"{at.program}: {what}"


# -- faults on purpose -------------------------------------------------------------------------------------------------


def changed(transfers: Transfers, program: str, event: str, **changes: object) -> Transfers:
    """Returns the transfers with another event in place of one."""
    return _with_runs(
        transfers, program, lambda run: tuple(replace(e, **changes) if e.name == event else e for e in run)
    )


def without(transfers: Transfers, program: str, name: str) -> Transfers:
    """Returns the transfers without an event."""

    def change(run: Run) -> Run:
        kept = [k for k, event in enumerate(run) if event.name != name]
        new = {old: position for position, old in enumerate(kept)}
        return tuple(replace(run[k], after=frozenset(new[b] for b in run[k].after if b in new)) for k in kept)

    return _with_runs(transfers, program, change)


def with_queue(transfers: Transfers, name: str, **changes: int) -> Transfers:
    """Returns the transfers with another queue, and another outbox if it is an inbox."""
    names = {name, transfers.loops.get(name, name)}
    queues = {n: replace(queue, **changes) if n in names else queue for n, queue in transfers.queues.items()}
    return replace(transfers, queues=queues)


def _with_runs(transfers: Transfers, program: str, change: Callable[[Run], Run]) -> Transfers:
    return replace(transfers, programs={**transfers.programs, program: tuple(map(change, transfers.programs[program]))})


# -- circuits ----------------------------------------------------------------------------------------------------------


class Edge(NamedTuple):
    """The k-th occurrence of `end` follows occurrence k - `tokens` of `start`."""

    start: At
    end: At
    tokens: int


def faults_of(transfers: Transfers) -> list[str]:
    """Returns the faults of any number of rounds in any order of events, if no event waits for a lock."""
    found = list(_mismatches(transfers))
    if found:
        return found
    programs = _program_edges(transfers)
    circuit = _circuit_without_token([*programs, *_message_edges(transfers)])
    if circuit:
        return [f"the workers wait for each other: {' < '.join(map(transfers.name_of, circuit))}"]
    for name, most in in_flight(transfers).items():
        if transfers.queues[name].capacity < most < math.inf:
            found.append(f"{name} fills up: it has {transfers.queues[name].capacity} places for {most:.0f} messages")
    circuit = _circuit_without_token([*programs, *_message_edges(transfers), *_place_edges(transfers)])
    if circuit:
        found.append(f"full queues block the workers: {' < '.join(map(transfers.name_of, circuit))}")
    return found


def in_flight(transfers: Transfers) -> dict[str, float]:
    """Maps each queue of `channels` to the most messages that are sent and not received, if queues have no limit.

    The number is infinite if the source never waits for the reader.
    """
    onward: dict[At, list[Edge]] = {}
    for edge in [*_program_edges(transfers), *_message_edges(transfers)]:
        onward.setdefault(edge.start, []).append(edge)
    found = {}
    for inbox, outbox in transfers.channels.items():
        puts, takes = transfers.puts[outbox], transfers.takes[inbox]
        tokens = [_fewest_tokens(onward, take) for take in takes]
        ahead = [min(before.get(put, math.inf) * len(puts) + k - m for m, before in enumerate(tokens))
                 for k, put in enumerate(puts)]  # fmt: skip
        found[inbox] = transfers.queues[inbox].initial + max(ahead, default=0)
    return found


def _mismatches(transfers: Transfers) -> Iterator[str]:
    for inbox, outbox in transfers.channels.items():
        queue, puts, takes = transfers.queues[inbox], transfers.puts[outbox], transfers.takes[inbox]
        if len(puts) != len(takes):
            yield f"{inbox}: {len(puts)} messages are sent in a round, {len(takes)} are received"
        if queue.initial > queue.capacity:
            yield f"{inbox} has {queue.capacity} places for its {queue.initial} first messages"
        for ends in (puts, takes):
            if any(not _is_before(transfers, *pair) for pair in itertools.pairwise(ends)):
                yield f"{inbox}: the order of its messages varies"


def _is_before(transfers: Transfers, first: At, second: At) -> bool:
    if (first.program, first.run) == (second.program, second.run):
        return first.position in transfers.programs[second.program][second.run][second.position].after
    return first.program == second.program


def _program_edges(transfers: Transfers) -> list[Edge]:
    found = []
    for program, runs in transfers.programs.items():
        for number, run in enumerate(runs):
            start, end = At(program, number, -1), At(program, number, len(run))
            found.append(Edge(start, end, 0))
            for k, event in enumerate(run):
                at = At(program, number, k)
                found += [Edge(start, at, 0), Edge(at, end, 0)]
                found += [Edge(At(program, number, before), at, 0) for before in event.after]
            following = (number + 1) % len(runs)
            found.append(Edge(end, At(program, following, -1), int(not following)))
            if program in transfers.released:
                found.append(Edge(At(transfers.released[program], number, -1), start, 0))
    return found


def _message_edges(transfers: Transfers) -> Iterator[Edge]:
    """Yields an edge from each event that puts a message to the one that takes it."""
    for inbox, outbox in transfers.channels.items():
        yield from _shifted(transfers.puts[outbox], transfers.takes[inbox], transfers.queues[inbox].initial)


def _place_edges(transfers: Transfers) -> Iterator[Edge]:
    """Yields an edge from each event that frees a place to the one that needs it."""
    for inbox, outbox in transfers.channels.items():
        queue, puts, takes = transfers.queues[inbox], transfers.puts[outbox], transfers.takes[inbox]
        places = queue.capacity - queue.initial + (queue.capacity if inbox in transfers.loops else 0)
        yield from _shifted(takes, puts, places)


def _shifted(first: Sequence[At], second: Sequence[At], ahead: int) -> Iterator[Edge]:
    """Yields edges from the k-th event of `first` to event k + `ahead` of `second`; both recur in each round."""
    for k, at in enumerate(first):
        rounds, position = divmod(k + ahead, len(second))
        yield Edge(at, second[position], rounds)


def _circuit_without_token(edges: Iterable[Edge]) -> list[At]:
    """Returns a circuit of events that wait for each other; empty if there is none."""
    waits: dict[At, set[At]] = {}
    for edge in edges:
        waits.setdefault(edge.start, set())
        waits.setdefault(edge.end, set())
        if not edge.tokens:
            waits[edge.end].add(edge.start)
    onward: dict[At, list[At]] = {at: [] for at in waits}
    for at, before in waits.items():
        for b in before:
            onward[b].append(at)
    ready = [at for at, before in waits.items() if not before]
    while ready:
        done = ready.pop()
        waits.pop(done)
        for at in onward[done]:
            waits[at].discard(done)
            if not waits[at]:
                ready.append(at)
    if not waits:
        return []
    path = [next(iter(waits))]
    while (following := min(waits[path[-1]])) not in path:
        path.append(following)
    return path[path.index(following) :][::-1]


def _fewest_tokens(onward: Mapping[At, Sequence[Edge]], start: At) -> dict[At, int]:
    """Maps the events that follow `start` to the fewest tokens on a path there."""
    found: dict[At, int] = {}
    front = [(0, start)]
    while front:
        tokens, at = heapq.heappop(front)
        if at not in found:
            found[at] = tokens
            for edge in onward.get(at, ()):
                heapq.heappush(front, (tokens + edge.tokens, edge.end))
    return found
