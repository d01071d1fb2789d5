"""Schedule: all workers save at the same steps, although only the chief's clock counts."""

from __future__ import annotations

import pytest

from autodist.checkpoint.save_schedule import Schedule


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Two:
    """The chief's schedule and another worker's, whose clock does not count."""

    def __init__(self, every_steps: int | None, every_minutes: float | None, step: int = 0) -> None:
        self.clock, self.said = Clock(), []

        def say(text: str) -> str:
            self.said.append(text)
            return text

        self.chief = Schedule(True, say, every_steps, every_minutes, step, self.clock)
        self.other = Schedule(False, lambda _: self.heard.pop(0), every_steps, every_minutes, step, Clock())

    def run(self, steps: range, seconds: float) -> list[int]:
        """Returns the steps after which both save, if each step takes `seconds`."""
        found = []
        for step in steps:
            self.clock.now += seconds
            is_due = self.chief.is_due(step)
            self.heard, self.said = self.said, []
            self.chief._share = self.say
            assert self.other.is_due(step) == is_due
            assert not self.heard
            if is_due:
                found.append(step)
                self.chief.saved(step)
                self.other.saved(step)
        return found

    def say(self, text: str) -> str:
        self.said.append(text)
        self.count = getattr(self, "count", 0) + 1
        return text


def test_steps_are_counted_without_a_word_for_each():
    two = Two(every_steps=100, every_minutes=None)
    assert two.run(range(1, 1001), seconds=0.01) == list(range(100, 1001, 100))
    assert two.count <= 20  # one a second, and some until it is known how long a step takes


def test_a_resumed_run_counts_from_the_restored_step():
    assert Two(every_steps=100, every_minutes=None, step=250).run(range(251, 500), seconds=0.01) == [300, 400]


def test_steps_that_come_several_at_once_are_not_missed():
    two = Two(every_steps=10, every_minutes=None)
    assert two.run(range(4, 60, 4), seconds=0.1) == [12, 20, 32, 40, 52]


@pytest.mark.parametrize("seconds", [0.001, 0.3, 45.0])
def test_minutes_are_the_chiefs(seconds):
    two = Two(every_steps=None, every_minutes=1)
    steps = max(8, int(200 / seconds))
    found = [step * seconds for step in two.run(range(1, steps), seconds)]
    times = [0.0, *found]
    late = [later - earlier - 60 for earlier, later in zip(times, found, strict=False)]
    assert len(found) >= 2
    assert all(0 <= one <= max(2 * 1.0, seconds) + seconds for one in late), late


def test_a_requested_checkpoint_is_saved_at_the_next_check():
    two = Two(every_steps=None, every_minutes=60)
    assert two.run(range(1, 1000), seconds=0.01) == []
    two.chief.request(lambda: None)
    (step,) = two.run(range(1000, 1300), seconds=0.01)
    assert step <= 1000 + 2 * 100


def test_a_requested_checkpoint_is_saved_once():
    two, did = Two(every_steps=10, every_minutes=None), []
    two.chief.request(lambda: did.append(two.chief.saved_step))
    (first, *rest) = two.run(range(1, 40), seconds=0.01)
    assert rest
    assert did == [first]


def test_nothing_is_saved_twice():
    two = Two(every_steps=5, every_minutes=None)
    assert two.run(range(1, 6), seconds=0.1) == [5]
    assert not two.chief.is_due(5)
