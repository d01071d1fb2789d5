"""The order in which the workers of a pipeline process the micro-batches."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.graph.pipeline_schedule import SCHEDULES, Order, Unit, bubble, make_schedule, max_in_flight, simulate

CHARTS = {
    "GPipe": """
F0 F1 F2 F3 F4 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 -- B4 --
.. F0 F1 F2 F3 F4 .. .. .. B0 -- B1 -- B2 -- B3 -- B4 -- .. ..
.. .. F0 F1 F2 F3 F4 B0 -- B1 -- B2 -- B3 -- B4 -- .. .. .. ..
""",
    "1F1B": """
F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- .. B3 -- .. B4 --
.. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 -- .. B4 -- .. ..
.. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- .. .. .. ..
""",
}


def chart(order: Order) -> str:
    """Draws the simulated step as text: one line per pipeline stage, each unit in its time slot."""
    when = simulate(order)
    width = max(len(str(unit)) for unit in when) + 1
    length = max(end for _, end in when.values())
    lines = []
    for units in order:
        cells = ["." * (width - 1) + " "] * length
        for unit in units:
            start, end = when[unit]
            cells[start:end] = [str(unit).ljust(width)] + ["-" * (width - 1) + " "] * (end - start - 1)
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_chart_of_a_schedule(schedule):
    assert chart(make_schedule(3, 5, schedule)) == CHARTS[schedule].strip()


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), schedule=st.sampled_from(SCHEDULES))
def test_each_unit_comes_once_none_waits_for_ever_and_a_step_lasts_as_long_as_it_must(stages, micro_batches, schedule):
    order = make_schedule(stages, micro_batches, schedule)
    units = [Unit(s, m, back) for s in range(stages) for m in range(micro_batches) for back in (False, True)]
    assert sorted(unit for one in order for unit in one) == sorted(units)
    simulate(order)
    assert bubble(order) == Fraction(stages - 1, stages - 1 + micro_batches)


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12))
def test_1f1b_keeps_the_activations_of_as_many_micro_batches_as_there_are_stages_from_here_on(stages, micro_batches):
    kept = [max_in_flight(units) for units in make_schedule(stages, micro_batches, "1F1B")]
    assert kept == [min(stages - stage, micro_batches) for stage in range(stages)]
    assert [max_in_flight(units) for units in make_schedule(stages, micro_batches, "GPipe")] == [micro_batches] * stages


def test_what_does_not_train_goes_forward_alone():
    assert chart(make_schedule(2, 3, "1F1B", trains=False)) == "F0 F1 F2 ..\n.. F0 F1 F2"
