"""CallMatching: a call that all workers make is collective, any other is local; none blocks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from autodist.runtime import call_matching
from autodist.runtime.call_matching import Call, CallMatching, CallMessage, CallMessageKind

LIMIT = 20.0
"""Seconds till a worker that still waits counts as hanging."""

WORKERS = 3

Script = Callable[["Worker"], list[bool]]


class Worker:
    """The calls of a script on one worker; a step waits for all."""

    def __init__(self, workers: Workers, index: int) -> None:
        self._workers, self.index = workers, index
        self.calls = CallMatching(index, WORKERS, workers.send)

    def step(self) -> None:
        if self.calls.reach_collective():
            self.calls.answer()
        self._workers.barrier.wait(LIMIT)

    def call(self, what: str = "evaluate", data: str = "", is_certain: bool = False) -> bool:
        return self.calls.are_made_together(Call(what, data), is_certain)

    def wait_for(self, event: threading.Event) -> None:
        assert event.wait(LIMIT)


class Workers:
    """Workers in threads, with a mailbox each."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORKERS)
        self.words: list[CallMessageKind] = []
        self._mail: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(WORKERS)]
        self.workers = [Worker(self, w) for w in range(WORKERS)]
        self._readers = [threading.Thread(target=self._read, args=(w,), daemon=True) for w in range(WORKERS)]
        for reader in self._readers:
            reader.start()

    def send(self, workers: Sequence[int], note: CallMessage) -> None:
        self.words.append(note.kind)
        for worker in workers:
            self._mail[worker].put(note.encode())

    def _read(self, worker: int) -> None:
        while (message := self._mail[worker].get()) is not None:
            self.workers[worker].calls.receive(CallMessage.decode(message))

    def run(self, script: Script) -> list[list[bool]]:
        def whole(worker: Worker) -> list[bool]:
            found = script(worker)
            worker.calls.leave()
            return found

        with ThreadPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(whole, worker) for worker in self.workers]
            return [future.result(LIMIT) for future in futures]

    def close(self) -> None:
        for worker, reader in enumerate(self._readers):
            self._mail[worker].put(None)
            reader.join(LIMIT)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_matching, "TIME_LIMIT", 0.05)


def test_steps_cost_no_note(workers: Workers) -> None:
    def script(worker: Worker) -> list[bool]:
        for _ in range(5):
            worker.step()
        return []

    workers.run(script)
    assert set(workers.words) == {CallMessageKind.PASSED}, "as each leaves"
    assert len(workers.words) == WORKERS


def test_calls_that_all_make_are_made_together(workers: Workers) -> None:
    def script(worker: Worker) -> list[bool]:
        found = [worker.call(), worker.call("predict")]
        worker.step()
        return [*found, worker.call(is_certain=True)]

    assert workers.run(script) == [[True] * 3] * WORKERS


@pytest.mark.parametrize("caller", range(WORKERS))
def test_a_call_during_a_step_of_the_others_is_not_collective(workers: Workers, caller: int) -> None:
    def script(worker: Worker) -> list[bool]:
        worker.step()
        found = [worker.call(), worker.call()] if worker.index == caller else []
        worker.step()
        return [*found, worker.call()]

    expected = [[False, False, True] if w == caller else [True] for w in range(WORKERS)]
    assert workers.run(script) == expected


def test_a_call_of_the_chief_alone_takes_the_others_from_none_that_follows(workers: Workers) -> None:
    def script(worker: Worker) -> list[bool]:
        found = [worker.call("evaluate")] if worker.index == 0 else []
        return [*found, worker.call("predict")]

    assert workers.run(script) == [[False, True], [True], [True]]


@pytest.mark.parametrize("caller", range(WORKERS))
def test_a_call_after_the_others_have_ended_is_not_collective(workers: Workers, caller: int) -> None:
    def script(worker: Worker) -> list[bool]:
        worker.step()
        return [worker.call()] if worker.index == caller else []

    assert workers.run(script) == [[False] if w == caller else [] for w in range(WORKERS)]


@pytest.mark.parametrize("missing", range(WORKERS))
def test_a_call_that_one_does_not_make_is_nobodys(workers: Workers, missing: int) -> None:
    def script(worker: Worker) -> list[bool]:
        found = [] if worker.index == missing else [worker.call()]
        worker.step()
        return [*found, worker.call()]

    assert workers.run(script) == [[True] if w == missing else [False, True] for w in range(WORKERS)]


def test_calls_with_data_of_their_own_are_each_workers(workers: Workers) -> None:
    def script(worker: Worker) -> list[bool]:
        found = worker.call(data=f"part {worker.index}", is_certain=True)
        return [found, worker.call(data="whole")]

    assert workers.run(script) == [[False, True]] * WORKERS


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("caller", range(WORKERS))
def test_a_call_while_the_others_wait_for_a_file_of_the_caller_is_not_collective(workers: Workers, caller: int) -> None:
    written = threading.Event()

    def script(worker: Worker) -> list[bool]:
        found = []
        if worker.index == caller:
            found.append(worker.call())
            written.set()
        worker.wait_for(written)
        worker.step()
        return found

    assert workers.run(script) == [[False] if w == caller else [] for w in range(WORKERS)]


@pytest.mark.usefixtures("hasty")
def test_validation_waits_for_the_last_worker_as_long_as_it_takes(workers: Workers) -> None:
    waited = threading.Event()

    def script(worker: Worker) -> list[bool]:
        if worker.index == 1:
            assert not waited.wait(4 * call_matching.TIME_LIMIT)
        return [worker.call(is_certain=True)]

    assert workers.run(script) == [[True]] * WORKERS
