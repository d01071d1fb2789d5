"""Variable-write consensus: after a write by any worker between two steps, all start from the chief's values."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from autodist.errors import ClusterError
from autodist.runtime import write_consensus
from autodist.runtime.control_messages import ControlKind, ControlMessage
from autodist.runtime.write_consensus import StepAction, WriteConsensus
from tests.cluster.runs import within

LIMIT = 20.0
"""Seconds till a worker that still waits counts as hanging."""

WORKERS = 3


@dataclass
class Workers:
    """Workers in threads: each has a value that steps make one larger, and that scripts write.

    A step waits for all, as one does that sums gradients.

    Attributes:
        values: of each worker's variable.
        dropped: workers that have written for nothing.
        letters: all that were sent.
        waits: True if a step waits for all.
        waits_for_receivers: True if the chief waits until all have its values, as it always does if a step does not.
    """

    values: list[int] = field(default_factory=lambda: [0] * WORKERS)
    dropped: list[int] = field(default_factory=list)
    letters: list[ControlMessage] = field(default_factory=list)
    waits: bool = True
    waits_for_receivers: bool = False

    def __post_init__(self) -> None:
        self._mail: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(WORKERS)]
        self._together = threading.Barrier(WORKERS)
        self.accords = [WriteConsensus(w, WORKERS, self._send, self._taken_by(w)) for w in range(WORKERS)]
        self._readers = [threading.Thread(target=self._read, args=(w,), daemon=True) for w in range(WORKERS)]
        for reader in self._readers:
            reader.start()

    def _taken_by(self, worker: int) -> Callable[[str], None]:
        def take(told: str) -> None:
            self.values[worker] = int(told)

        return take

    def _send(self, workers: Sequence[int], letter: ControlMessage) -> None:
        self.letters.append(letter)
        for worker in workers:
            self._mail[worker].put(letter.encode())

    def _read(self, worker: int) -> None:
        while (message := self._mail[worker].get()) is not None:
            self.accords[worker].receive(ControlMessage.decode(message))

    def close(self) -> None:
        for worker, reader in enumerate(self._readers):
            self._mail[worker].put(None)
            reader.join(LIMIT)

    def step(self, worker: int, written: int | None) -> None:
        """One step before which a worker's script may have written."""
        mine = self.accords[worker]
        is_ahead = written is not None
        if written is not None:
            self.values[worker] = written
        while True:
            turn, before = self._before(worker, is_ahead), self.values[worker]
            if self.waits:
                self._together.wait(LIMIT)
            self.values[worker] += 1
            if turn is StepAction.VOID and worker == 0:
                self.values[0], is_ahead = before, True
            elif not mine.ended():
                return
            else:
                is_ahead = False

    def _before(self, worker: int, is_ahead: bool) -> StepAction:
        mine = self.accords[worker]
        if mine.begins(is_ahead):
            if mine.owes_answers:
                mine.answer_waiting()
            return StepAction.STEP
        turn, names = mine.agree(self.waits)
        if turn is StepAction.PUSH:
            mine.give(str(self.values[0]))
            mine.pushed(["v"], self.waits_for_receivers or not self.waits)
            return StepAction.STEP
        if worker and turn is StepAction.STEP and not names:
            self.dropped.append(worker)
            self.values[worker] = self.values[0] - 1 if self.waits else self.values[worker]
        return turn

    def run(self, steps: int, written: Callable[[int, int], int | None], holds: Callable[[int, int], None]) -> None:
        """Each worker makes its steps; `written` and `holds` are called before each, with worker and step."""

        def script(worker: int) -> None:
            for number in range(steps):
                holds(worker, number)
                self.step(worker, written(worker, number))
            self.accords[worker].leave()

        with ThreadPoolExecutor(WORKERS) as pool:
            for future in [pool.submit(script, w) for w in range(WORKERS)]:
                future.result(LIMIT)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(write_consensus, "QUERY_AFTER", 0.05)
    made = Workers()
    yield made
    made.close()


def nobody(worker: int, number: int) -> None:
    """Holds no worker back."""


def test_nothing_is_sent_where_nothing_was_written(workers: Workers):
    workers.run(5, lambda worker, number: None, nobody)
    assert workers.values == [5, 5, 5]
    assert {one.kind for one in workers.letters} <= {ControlKind.LEFT, ControlKind.BEGUN}


def test_equal_writes_of_all_workers_take_the_value_of_the_chief(workers: Workers):
    workers.run(4, lambda worker, number: 100 + worker if number == 2 else None, nobody)
    assert workers.values == [102, 102, 102]
    kinds = {letter.kind for letter in workers.letters}
    assert ControlKind.VOID not in kinds and ControlKind.PUSHED in kinds


def test_the_chief_begins_when_all_have_its_values(workers: Workers):
    workers.waits_for_receivers = True
    workers.run(4, lambda worker, number: 100 if worker == 0 and number else None, nobody)
    subjects = [letter.kind for letter in workers.letters]
    for end in (k for k, kind in enumerate(subjects) if kind == ControlKind.PUSHED):
        before = subjects[:end]
        assert before.count(ControlKind.TAKEN) == (WORKERS - 1) * before.count(ControlKind.GIVEN) > 0


def test_the_chief_does_not_wait_for_receivers_before_a_synchronous_step(workers: Workers):
    def take(told: str) -> None:
        assert within(LIMIT, lambda: any(one.kind is ControlKind.PUSHED for one in workers.letters))
        workers.values[1] = int(told)

    workers.accords[1]._take = take
    workers.run(4, lambda worker, number: 100 + worker if number == 1 else None, nobody)
    assert workers.values == [103, 103, 103]


def test_a_worker_that_waits_before_a_step_is_not_ready_for_the_next(workers: Workers):
    mine, sent = workers.accords[1], workers.letters
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.agree, True)
        assert within(LIMIT, lambda: sent and sent[-1].kind is ControlKind.READY)
        mine.receive(ControlMessage(ControlKind.QUERY, 2, 0))
        assert (sent[-1].kind, sent[-1].step) == (ControlKind.COMING, 2)
        mine.receive(ControlMessage(ControlKind.PUSHED, 1, 0, ("v",)))
        assert waiting.result(LIMIT) == (StepAction.STEP, frozenset({"v"}))
    assert not mine.ended() and not mine.begins(False)


def test_writes_of_the_chief_alone_reach_workers_that_wait_in_the_step(workers: Workers):
    workers.run(4, lambda worker, number: 100 if (worker, number) == (0, 2) else None, nobody)
    assert workers.values == [102, 102, 102]


def test_writes_of_the_chief_before_each_step_reach_all_workers(workers: Workers):
    workers.run(4, lambda worker, number: 100 * number if worker == 0 else None, nobody)
    assert workers.values == [301, 301, 301]


def test_writes_of_another_worker_alone_are_dropped(workers: Workers):
    workers.run(4, lambda worker, number: 100 if (worker, number) == (1, 2) else None, nobody)
    assert workers.dropped == [1] and workers.values[0] == workers.values[2] == 4


def test_without_waiting_the_others_join_after_their_step(workers: Workers):
    workers.waits = False
    workers.run(6, lambda worker, number: 100 if (worker, number) == (0, 1) else None, asynchronously(workers))
    assert workers.values[0] == 105


def asynchronously(workers: Workers) -> Callable[[int, int], None]:
    """No worker makes its last step before it was requested to come."""

    def hold(worker: int, number: int) -> None:
        if worker and number == 5:
            assert within(LIMIT, lambda: any(one.worker == worker for one in workers.letters))

    return hold


def test_without_waiting_no_worker_waits_for_one_that_has_left(workers: Workers):
    workers.waits = False
    left = threading.Event()

    def hold(worker: int, number: int) -> None:
        if worker == 0 and number == 2:
            assert within(LIMIT, lambda: sum(one.kind == ControlKind.LEFT for one in workers.letters) == 2)
            left.set()

    workers.run(4, lambda worker, number: 100 if (worker, number) == (0, 2) else None, hold)
    assert left.is_set() and workers.values[0] == 102


def test_without_waiting_no_worker_waits_for_a_chief_that_has_left(workers: Workers):
    workers.waits = False

    def hold(worker: int, number: int) -> None:
        if worker == 1 and number == 2:
            assert within(LIMIT, lambda: any(one.step > 1 << 60 for one in workers.letters))

    workers.run(4, lambda worker, number: 100 if (worker, number) == (1, 3) else None, hold)
    assert workers.dropped == [1]


def test_a_worker_that_is_beyond_the_step_is_told_of(workers: Workers):
    """For example, an evaluation for which no worker waits: its result cannot be taken back."""
    for one in workers.accords[1:]:
        assert one.begins(False) and not one.ended()
    assert not workers.accords[0].begins(True)
    with pytest.raises(ClusterError, match=r"worker 1 has made without them.*on every worker"):
        workers.accords[0].agree(True)


def test_a_letter_is_read_as_it_was_sent():
    letter = ControlMessage(ControlKind.PUSHED, 7, 2, ("v", "w"), again=True)
    assert ControlMessage.decode(letter.encode()) == letter
