"""Clocks that differ, and the largest error of the estimated difference."""

from __future__ import annotations

from autodist.runtime.clocks import ClockOffset, measure_offset


def test_the_true_offset_lies_within_the_uncertainty_however_slow_one_way_is() -> None:
    for way_there in (0.0, 0.3, 1.0):
        clock = ClockOffset.of(sent=100.0, remote=100.0 + way_there + 7, received=101.0)
        assert abs(clock.ahead - 7) <= clock.uncertainty == 0.5


def test_the_answer_that_came_soonest_counts_whatever_the_others_took() -> None:
    time, ways = 0.0, iter([1.0, 0.9, 0.01, 0.7, 0.8, 0.6, 0.5, 0.4])

    def tell() -> float:
        nonlocal time
        time += next(ways)
        return time - 3

    clock = measure_offset(tell, lambda: time)
    assert clock.uncertainty < 0.01
    assert abs(clock.ahead + 3) <= clock.uncertainty
