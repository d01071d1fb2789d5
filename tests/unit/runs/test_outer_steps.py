"""Outer steps: due at the same step numbers whatever the calls in which steps are made."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.runs.outer_steps import OuterSteps
from autodist.runtime.program import ProgramOuterStep


def outer_steps(*every: int) -> tuple[OuterSteps, list[int]]:
    """Outer steps of several lengths, and the list to which each adds its length when it runs."""
    ran: list[int] = []
    steps = OuterSteps(lambda call: call())
    made = {str(n): ProgramOuterStep(n, lambda n=n: ran.append(n)) for n in every}
    steps.add(SimpleNamespace(outer_steps=made))
    return steps, ran


@given(
    every=st.sets(st.integers(1, 7), max_size=3), calls=st.lists(st.integers(1, 9), max_size=6), start=st.integers(0, 9)
)
def test_calls_of_several_steps_are_divided_where_outer_steps_are_due(every, calls, start):
    steps, ran = outer_steps(*every)
    number = start
    for count in calls:
        batches = list(range(number, number + count))
        parts = list(steps.divide(batches, number))
        assert [batch for part in parts for batch in part] == batches
        for part in parts:
            number += len(part)
            assert steps.after(number, len(part)) == any(number % n == 0 for n in every)
    assert sorted(ran) == sorted(n for n in every for step in range(start + 1, number + 1) if step % n == 0)


def test_an_end_runs_those_that_are_open_once():
    steps, ran = outer_steps(2, 3)
    assert not steps.end()
    steps.after(2, 2)
    assert ran == [2]
    assert steps.end() and ran == [2, 3]
    assert not steps.end()


def test_open_ones_are_told_at_the_end_of_the_script(caplog: pytest.LogCaptureFixture):
    steps, _ = outer_steps(4)
    steps.after(5, 5)
    with caplog.at_level(logging.WARNING, "autodist"):
        steps.warn_of_open_ones()
    assert not caplog.messages
    steps.after(7, 2)
    with caplog.at_level(logging.WARNING, "autodist"):
        steps.warn_of_open_ones()
    assert "the last 2 local steps" in caplog.text and "ad.end_local_steps()" in caplog.text
