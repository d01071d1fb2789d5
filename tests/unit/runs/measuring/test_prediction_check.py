"""The predicted time of a step is compared with the times of the first steps, once."""

from __future__ import annotations

import logging

import pytest

from autodist.proto import strategy_pb2
from autodist.runs.measuring.prediction_check import SETTLING, TIMED, PredictionCheck, check_of, predicted


def choice(seconds: float = 0.010) -> strategy_pb2.Choice:
    terms = [strategy_pb2.Term(name="computation", seconds=0.8 * seconds)]
    best = strategy_pb2.Alternative(name="AllReduce", seconds=seconds)
    return strategy_pb2.Choice(alternatives=[best], terms=terms, basis="assumed links")


def reported(seconds: list[float], caplog: pytest.LogCaptureFixture, steps: int = 1) -> list[logging.LogRecord]:
    check = PredictionCheck(choice())
    with caplog.at_level(logging.INFO, "autodist"):
        for one in seconds:
            check.add(one * steps, steps)
    return caplog.records


def test_nothing_is_reported_before_enough_steps(caplog):
    assert reported([0.01] * (SETTLING + TIMED - 1), caplog) == []


def test_the_first_steps_do_not_count_and_one_line_is_logged(caplog):
    (record,) = reported([5.0] * SETTLING + [0.011] * TIMED + [5.0] * 50, caplog, steps=4)
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("a step takes 11 ms (median of 20), and Auto predicted 10 ms")


@pytest.mark.parametrize("seconds", [0.02, 0.005])
def test_a_large_difference_is_a_warning_with_the_parts(caplog, seconds):
    (record,) = reported([seconds] * (SETTLING + TIMED), caplog)
    assert record.levelno == logging.WARNING
    assert "computation 8 ms (assumed links)" in record.getMessage()


def test_only_a_predicted_step_is_checked_and_only_on_the_chief():
    assert check_of(strategy_pb2.Strategy(choice=choice()), is_chief=False) is None
    assert check_of(strategy_pb2.Strategy(builder="AllReduce"), is_chief=True) is None
    assert isinstance(check_of(strategy_pb2.Strategy(choice=choice()), is_chief=True), PredictionCheck)


def test_the_file_of_a_trace_has_the_prediction_and_its_parts():
    found = predicted(strategy_pb2.Strategy(choice=choice()))
    assert found == {"predicted": {"seconds": 0.010, "terms": {"computation": pytest.approx(0.008)}}}
    assert predicted(strategy_pb2.Strategy(builder="AllReduce")) == {}
