"""The steps that are traced: at equal numbers on all workers, in turns, within a fraction of the time."""

from __future__ import annotations

import itertools

import pytest

from autodist.runs.metrics.trace_schedule import FIRST, FRACTION, LEAD, TURN_LIMIT, TraceSchedule

STEP, COST = 0.01, 0.02
NEXT = COST / FRACTION / STEP
"""Steps of 10 ms until tracing, which takes 20 ms, is within its fraction."""


class Training:
    """A chief and another worker that make the same steps in turn, of 10 ms each."""

    def __init__(self) -> None:
        self.now, self.step, self.messages = 0.0, 0, list[tuple[int, int]]()
        self.chief = TraceSchedule(0, lambda selected: self.messages.append((self.step, selected)), lambda: self.now)
        self.other = TraceSchedule(0, None, lambda: self.now)
        self.traced: list[tuple[str, int]] = []

    def make(self, steps: int, *names: str, delay: int = LEAD - 1, cost: float = COST) -> None:
        """Makes steps of these names in turn; a message arrives some steps after it was sent."""
        for _ in range(steps):
            name = names[self.step % len(names)]
            due = [schedule.is_due(name, self.step) for schedule in (self.chief, self.other)]
            assert due[0] == due[1], self.step
            self.step, self.now = self.step + 1, self.now + STEP
            if due[0]:
                self.traced.append((name, self.step))
                for schedule in (self.chief, self.other):
                    schedule.traced(name, self.step, cost)
            while self.messages and self.messages[0][0] + delay <= self.step:
                self.other.postpone(self.messages.pop(0)[1])


def test_the_first_trace_comes_early_and_does_not_count_as_its_preparation_is_slow() -> None:
    training = Training()
    training.make(FIRST + LEAD + 10, "a")
    assert training.traced == [("a", FIRST + 1), ("a", FIRST + LEAD + 2)]


def test_later_ones_stay_within_their_fraction_of_the_time() -> None:
    training = Training()
    training.make(20000, "a")
    numbers = [step for _, step in training.traced[1:]]
    gaps = [after - before for before, after in itertools.pairwise(numbers)]
    assert len(gaps) > 5
    assert gaps == pytest.approx([NEXT] * len(gaps), abs=2)


def test_a_trace_that_looks_free_on_a_busy_machine_is_not_repeated_at_once() -> None:
    training = Training()
    training.make(4000, "a", cost=-1.0)
    assert 2 < len(training.traced) <= 2 + 4000 * FRACTION


def test_steps_of_several_names_take_turns() -> None:
    training = Training()
    training.make(16000, "a", "b")
    assert [name for name, _ in training.traced[:6]] == ["a", "b"] * 3


def test_a_name_that_is_called_no_more_does_not_keep_the_others_from_being_traced() -> None:
    training = Training()
    training.make(30, "first")
    training.make(16000, "second")
    names = [name for name, _ in training.traced]
    assert names.count("second") > 3
    assert names[-1] == "second"


def test_a_message_that_is_late_does_not_stop_a_worker() -> None:
    schedule = TraceSchedule(0)
    assert schedule.is_due("a", FIRST)
    schedule.traced("a", FIRST + 1, COST)
    assert not schedule.is_due("a", FIRST + TURN_LIMIT)
    assert schedule.is_due("a", FIRST + 1 + TURN_LIMIT)


def test_a_message_that_arrives_before_the_end_of_the_traced_step_counts() -> None:
    schedule = TraceSchedule(0)
    assert schedule.is_due("a", FIRST)
    schedule.postpone(FIRST + 300)
    schedule.traced("a", FIRST + 1, COST)
    assert not schedule.is_due("a", FIRST + 299)
    assert schedule.is_due("a", FIRST + 300)
