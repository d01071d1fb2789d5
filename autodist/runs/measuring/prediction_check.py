"""Compares the step time that `Auto` predicted with the times of the first steps."""

from __future__ import annotations

import logging
import statistics

from autodist.logs.formatting import readable_seconds
from autodist.proto import strategy_pb2

log = logging.getLogger("autodist")

SETTLING, TIMED = 5, 20
"""The first steps allocate memory and do not count; then so many calls are timed."""

MOST = 0.25
"""Relative difference above which the parts of the prediction are logged."""


class PredictionCheck:
    """Reports once, after some steps.

    Args:
        choice: the prediction.
    """

    def __init__(self, choice: strategy_pb2.Choice) -> None:
        self._choice, self._calls, self._seconds = choice, 0, list[float]()

    @property
    def is_done(self) -> bool:
        """True if it has reported."""
        return len(self._seconds) >= TIMED

    def add(self, seconds: float, steps: int) -> None:
        """Adds a call that has made some steps."""
        self._calls += 1
        if self._calls > SETTLING and not self.is_done:
            self._seconds.append(seconds / steps)
            if self.is_done:
                self._report(statistics.median(self._seconds))

    def _report(self, took: float) -> None:
        predicted = self._choice.alternatives[0].seconds
        times = f"a step takes {readable_seconds(took)} (median of {TIMED}), and Auto predicted"
        times = f"{times} {readable_seconds(predicted)}"
        if abs(took - predicted) <= MOST * took:
            log.info("%s.", times)
            return
        parts = ", ".join(f"{term.name} {readable_seconds(term.seconds)}" for term in self._choice.terms)
        log.warning(
            "%s: %s (%s). Another plan may be faster. With AUTODIST_TRACE=FOLDER and `autodist trace FOLDER` you see "
            "which part differs; if the links have changed, remove the file with their measurement.",
            times, parts, self._choice.basis,
        )  # fmt: skip


def predicted(strategy: strategy_pb2.Strategy) -> dict[str, object]:
    """Returns the predicted seconds of a step and its parts, for the file of a trace; empty if there are none."""
    if not strategy.choice.terms:
        return {}
    terms = {term.name: term.seconds for term in strategy.choice.terms}
    return {"predicted": {"seconds": strategy.choice.alternatives[0].seconds, "terms": terms}}


def check_of(strategy: strategy_pb2.Strategy, is_chief: bool) -> PredictionCheck | None:
    """Returns the check of a step's strategy, on the chief; None if nothing was predicted."""
    return PredictionCheck(strategy.choice) if is_chief and strategy.choice.terms else None
