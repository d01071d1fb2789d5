from __future__ import annotations

import logging
import threading

import pytest

from autodist.cluster.protocol import Doing, Progress
from autodist.cluster.stalls import Limits, StallWatch, WorkerProgress, find_stall

BETWEEN = 5.0
LIMITS = Limits(stall=60.0, answer=60.0, deadlock=300.0)


def seen(
    name: str, doing: Doing, since: float = 100.0, used: float = 0.0, queued: float = 0.0, calls: int | None = None
) -> WorkerProgress:
    """A worker that has done the same for `since` seconds, and has used so much processor time between two looks."""
    before, now = Progress(doing, since - BETWEEN, 7.0, 3.0), Progress(doing, since, 7.0 + used, 3.0 + queued, calls)
    return WorkerProgress(name, before, now, BETWEEN)


def since_answer(name: str, seconds: float, since_message: float = 1.0) -> WorkerProgress:
    """A worker that has not answered for `seconds`; its agent has sent nothing for `since_message` of them."""
    return WorkerProgress(name, None, None, BETWEEN, seconds, since_message)


def waiting(name: str, since: float = 100.0) -> WorkerProgress:
    return seen(name, Doing.STEPPING, since)


def done(name: str, calls: int | None = None) -> WorkerProgress:
    return seen(name, Doing.DONE, calls=calls)


def stall_of(chief: WorkerProgress, *others: WorkerProgress) -> tuple[str, str] | None:
    found = find_stall(chief, {other.name: other for other in others}, LIMITS)
    return None if found is None else (found.worker, found.reason)


@pytest.mark.parametrize(
    ("workers", "worker", "words"),
    [
        ([waiting("a"), done("b")], "b", "has ended its script, and a waits for it in a further step"),
        ([waiting("a"), waiting("b"), done("c")], "c", "has ended its script, and a and b wait for it"),
        ([done("a"), waiting("b"), done("c")], "c", "and b waits for it"),
        ([done("a"), done("b"), waiting("c")], "b", "and c waits for it"),
        ([done("a"), waiting("b"), waiting("c")], "b", "waits in a step for a, whose script has ended"),
        ([waiting("a", 400), waiting("b", 400)], "b", "have waited for one another for 400 s"),
        (
            [waiting("a", 400), seen("b", Doing.STEPPING, 400, 0.2, 1.0)],
            "b",
            "have waited for one another",
        ),  # both poll
        ([waiting("a"), since_answer("b", 61)], "b", "has not answered for 60 s, while a waits for it: its process"),
        (
            [waiting("a"), since_answer("b", 61), waiting("c", 1), seen("d", Doing.STEPPING, used=1.0)],
            "b",
            "has not answered for 60 s, while a and d wait for it:",
        ),
        ([seen("a", Doing.ELSE), since_answer("b", 61)], "b", "has not answered for 60 s: its process"),
        (
            [seen("a", Doing.JOINING), since_answer("b", 61)],
            "b",
            "has not answered for 60 s, while a waits for it: its process",
        ),
        ([done("a"), seen("b", Doing.ELSE), since_answer("c", 61)], "c", "has not answered"),
        (
            [waiting("a"), since_answer("b", 61, since_message=62)],
            "b",
            "was lost: nothing was heard from its machine for 62 s, while a waits for it; check that",
        ),
        ([waiting("a"), since_answer("b", 61, since_message=31)], "b", "was lost: nothing was heard"),
        # The call that a worker is in needs the others, though it computes, and though others are elsewhere.
        (
            [seen("a", Doing.STEPPING, 1, used=5.0, calls=8), done("b", 7), seen("c", Doing.ELSE, calls=7)],
            "b",
            "has ended its script, and a waits for it in a further step",
        ),
        ([done("a", 7), seen("b", Doing.STEPPING, 1, calls=8)], "b", "waits in a step for a, whose script has ended"),
        ([seen("a", Doing.STEPPING, 1, calls=8), done("b", 8), done("c", 7)], "c", "and a waits for it"),
    ],
)
def test_what_can_never_go_on(workers: list[WorkerProgress], worker: str, words: str) -> None:
    found = stall_of(*workers)
    assert found is not None
    assert found[0] == worker
    assert words in found[1]


@pytest.mark.parametrize(
    "workers",
    [
        [waiting("a"), seen("b", Doing.ELSE)],
        [waiting("a"), done("b"), seen("c", Doing.ELSE)],
        [waiting("a"), seen("b", Doing.STEPPING, used=2.0)],  # it computes
        [seen("a", Doing.STEPPING, used=2.0), done("b")],
        [seen("a", Doing.STEPPING, 900, used=0.3, queued=4.5), done("b")],  # it would, if it got a processor
        [waiting("a"), since_answer("b", 59)],
        [waiting("a"), done("b"), since_answer("c", 59)],
        [seen("a", Doing.JOINING, 290), seen("b", Doing.ELSE, 400)],  # it imports, reads or traces
        [waiting("a"), waiting("b")],  # not for long enough: they may wait for something else than workers
        [waiting("a", 30), done("b")],
        [waiting("a"), seen("b", Doing.STEPPING, since=3.0)],  # it has begun that step between the two looks
        [done("a"), done("b")],
        [done("a"), seen("b", Doing.ELSE)],
        [done("a", 7), seen("b", Doing.STEPPING, 1, calls=7)],  # it was there in that call
        [done("a", 7), seen("b", Doing.ELSE, 900, calls=8)],
        [done("a"), seen("b", Doing.STEPPING, 1, calls=8)],  # which may differ, as without a lockstep
        [seen("a", Doing.STEPPING, 1, calls=8), seen("b", Doing.ELSE, calls=7)],
    ],
)
def test_what_may_go_on(workers: list[WorkerProgress]) -> None:
    assert stall_of(*workers) is None


class Coordinator:
    """Answers from a list; the run ends with the list."""

    def __init__(self, *answers: Progress | None, heard: frozenset[str] = frozenset("b")) -> None:
        self._answers, self._heard = list(answers), heard
        self.over = threading.Event()
        self.given_up: list[tuple[str, str]] = []
        self.asked_starting: set[bool] = set()

    def request_progress(self, limit: float, are_starting: bool) -> dict[str, Progress | None] | None:
        self.asked_starting.add(are_starting)
        return {"b": self._answers.pop(0)} if self._answers else None

    def take_senders(self) -> set[str]:
        return set(self._heard)

    def wait_for_end(self, timeout: float) -> bool:
        if self.given_up or not self._answers:
            self.over.set()
        return self.over.is_set()

    def end_with_failure(self, worker: str, reason: str, is_lost: bool) -> None:
        assert is_lost is reason.startswith("was lost")
        self.given_up.append((worker, reason))


def watch(coordinator: Coordinator, doing: Doing, since: float) -> None:
    StallWatch(coordinator, "a", lambda: Progress(doing, since, 0.0), LIMITS)
    assert coordinator.over.wait(10)


def test_a_run_that_can_never_go_on_is_given_up() -> None:
    coordinator = Coordinator(*[Progress(Doing.DONE, 80.0, 1.0)] * 6)
    watch(coordinator, Doing.STEPPING, 100.0)
    assert [worker for worker, _ in coordinator.given_up] == ["b"]


def test_a_step_after_the_end_of_another_script_is_given_up_at_the_first_look() -> None:
    coordinator = Coordinator(Progress(Doing.DONE, 1.0, 1.0, calls=3))
    StallWatch(coordinator, "a", lambda: Progress(Doing.STEPPING, 5.0, 0.0, calls=4), LIMITS)
    assert coordinator.over.wait(10)
    assert [worker for worker, _ in coordinator.given_up] == ["b"]


def test_a_worker_that_never_answers_is_given_up_when_it_has_not_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, read = Coordinator(*[None] * 100), iter(range(0, 1000, 5))
    monkeypatch.setattr("autodist.cluster.stalls.Stopwatch.read", lambda self: float(next(read)))
    watch(coordinator, Doing.STEPPING, 10.0)
    assert [worker for worker, _ in coordinator.given_up] == ["b"]
    assert "its process was stopped" in coordinator.given_up[0][1]
    assert next(read) == 70  # the first question was at 0, the last answer was awaited until 65


def test_a_machine_of_which_nothing_is_received_is_named_and_not_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Progress(Doing.STEPPING, 80.0, 1.0), *[None] * 100]
    coordinator, read = Coordinator(*answers, heard=frozenset()), iter(range(0, 1000, 5))
    monkeypatch.setattr("autodist.cluster.stalls.Stopwatch.read", lambda self: float(next(read)))
    watch(coordinator, Doing.STEPPING, 10.0)
    ((worker, reason),) = coordinator.given_up
    assert worker == "b"
    assert reason.startswith("was lost: nothing was heard from its machine for ")


@pytest.mark.parametrize(("doing", "since"), [(Doing.ELSE, 1000.0), (Doing.STEPPING, 1.0)])
def test_nobody_is_asked_while_the_chief_has_not_waited_for_long(
    doing: Doing, since: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False, False, True])
    coordinator = Coordinator(Progress(Doing.DONE, 80.0, 1.0))
    asked: list[tuple[float, bool]] = []
    monkeypatch.setattr(coordinator, "request_progress", lambda *about: asked.append(about))

    def wait_for_end(timeout: float) -> bool:
        if is_over := next(looks):
            coordinator.over.set()
        return is_over

    monkeypatch.setattr(coordinator, "wait_for_end", wait_for_end)
    watch(coordinator, doing, since)
    assert not asked


@pytest.mark.parametrize(("doing", "step"), [(Doing.JOINING, "its first step"), (Doing.STEPPING, "a step")])
def test_a_worker_that_is_busy_elsewhere_is_named_once_until_twice_the_time(
    doing: Doing, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Coordinator(*[Progress(Doing.ELSE, 70.0, 1.0)] * 6)
    with caplog.at_level(logging.WARNING, "autodist.cluster"):
        watch(coordinator, doing, LIMITS.stall + 5)
    assert [r.getMessage() for r in caplog.records] == [
        f"a has waited 65 s, in {step}, for workers that are outside of any step: b (for 70 s)."
    ]
    assert coordinator.asked_starting == {doing == Doing.JOINING}
