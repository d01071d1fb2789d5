"""A search of the states that programs with queues can reach, event by event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.transfers.graphs import Event, Queue, Run, Transfers

State = tuple[tuple[int, ...], ...]
"""For each program, the number of runs that have ended and a bit for each event of the next; then all messages."""


@dataclass(frozen=True)
class Explored:
    """The results of a search.

    Attributes:
        states: the number of states.
        faults: a text for each state without a next one that is not the end, and for messages left at the end.
        fullest: the most messages that each queue has in a state.
    """

    states: int
    faults: tuple[str, ...]
    fullest: dict[str, int]


def explore(transfers: Transfers, rounds: int, is_reduced: bool = False) -> Explored:
    """Searches all states of some rounds, each of which all programs run.

    Args:
        transfers: the programs and queues.
        rounds: the number of rounds.
        is_reduced: if True, an event of queues that no other program can empty or fill is not tried in other orders,
            since all orders of such events end in the same state.
    """
    return _Search(transfers, rounds, is_reduced).run()


class _Search:
    def __init__(self, transfers: Transfers, rounds: int, is_reduced: bool) -> None:
        self.rounds, self.is_reduced = rounds, is_reduced
        self.names = [*transfers.programs, *transfers.loops]
        moves: list[tuple[Run, ...]] = [
            ((Event("move", (outbox,), (inbox,)),),) for inbox, outbox in transfers.loops.items()
        ]
        self.runs = [*transfers.programs.values(), *moves]
        self.steps = len(transfers.programs)
        self.released = {self.names.index(k): self.names.index(v) for k, v in transfers.released.items()}
        self.position = {name: k for k, name in enumerate(transfers.queues)}
        outboxes = set(transfers.loops.values())
        self.queues = [
            Queue(queue.capacity, 0 if name in outboxes else queue.initial, queue.is_lock)
            for name, queue in transfers.queues.items()
        ]

    def run(self) -> Explored:
        first: State = (*((0, 0) for _ in self.runs), tuple(queue.initial for queue in self.queues))
        seen, front = {first}, [first]
        faults: dict[str, None] = {}
        while front:
            state = front.pop()
            following = list(self._following(state))
            if not following:
                faults.update(dict.fromkeys(self._faults_at_end(state)))
            for other in following:
                if other not in seen:
                    seen.add(other)
                    front.append(other)
        fullest = {name: max(state[-1][k] for state in seen) for name, k in self.position.items()}
        return Explored(len(seen), tuple(faults), fullest)

    def _following(self, state: State) -> Iterator[State]:
        possible = list(self._possible(state))
        if self.is_reduced:
            alone = next((one for one in possible if not self._is_shared(one[1])), None)
            possible = possible if alone is None else [alone]
        for (program, position), event in possible:
            yield self._after(state, program, position, event)

    def _possible(self, state: State) -> Iterator[tuple[tuple[int, int], Event]]:
        for program, (ended, done) in enumerate(state[:-1]):
            if not self._is_running(state, program):
                continue
            for position, event in enumerate(self._run(program, ended)):
                waits = done >> position & 1 or any(not done >> before & 1 for before in event.after)
                if not waits and self._has_messages_and_places(state[-1], event):
                    yield (program, position), event

    def _is_running(self, state: State, program: int) -> bool:
        ended = state[program][0]
        if program >= self.steps:
            return True
        is_released = program not in self.released or ended <= state[self.released[program]][0]
        return is_released and ended < self.rounds * len(self.runs[program])

    def _has_messages_and_places(self, messages: tuple[int, ...], event: Event) -> bool:
        places = (self.position[name] for name in event.puts)
        return all(messages[self.position[name]] > 0 for name in event.takes) and all(
            messages[k] < self.queues[k].capacity for k in places
        )

    def _is_shared(self, event: Event) -> bool:
        return any(self.queues[self.position[name]].is_lock for name in (*event.takes, *event.puts))

    def _after(self, state: State, program: int, position: int, event: Event) -> State:
        messages = list(state[-1])
        for name in event.takes:
            messages[self.position[name]] -= 1
        for name in event.puts:
            messages[self.position[name]] += 1
        ended, done = state[program]
        done |= 1 << position
        if program >= self.steps:  # a loop has no number of runs
            done = 0
        elif done == (1 << len(self._run(program, ended))) - 1:
            ended, done = ended + 1, 0
        return (*state[:program], (ended, done), *state[program + 1 : -1], tuple(messages))

    def _run(self, program: int, ended: int) -> Run:
        return self.runs[program][ended % len(self.runs[program])]

    def _faults_at_end(self, state: State) -> Iterator[str]:
        going = [k for k in range(self.steps) if state[k][0] < self.rounds * len(self.runs[k])]
        for program in going:
            ended, done = state[program]
            waiting = [e.name for k, e in enumerate(self._run(program, ended)) if not done >> k & 1]
            yield f"{self.names[program]} waits for ever in its run {ended + 1}: {', '.join(waiting)}"
        for name, k in self.position.items() if not going else ():
            if state[-1][k] != self.queues[k].initial:
                yield f"{name} has {state[-1][k]} messages at the end, and {self.queues[k].initial} at the beginning"
