"""Attempts of all workers to measure a step at the same time; what they have in common."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from autodist.errors import ClusterError
from autodist.graph.step import CapturedStep
from autodist.logs.formatting import readable_seconds, words_of
from autodist.runs.measuring.copied_step import OneReplica
from autodist.runs.measuring.measurable import CannotMeasure
from autodist.runtime.variables import TrackedVariable

if TYPE_CHECKING:
    from autodist.runs.run import Run

log = logging.getLogger("autodist")


class Measured(Protocol):
    """A measurement.

    Attributes:
        took: seconds that it took.
    """

    @property
    def took(self) -> float: ...


M = TypeVar("M", bound=Measured)

Values = Mapping[str, Callable[[], np.ndarray]]
"""Functions that return the present values of a step's variables, by name."""


def begin_together(run: Run) -> None:
    """Returns at about the same time on all workers; a collective call.

    Those of one machine then compete for its processors and its memory, as they will in training.
    """
    if not run.have_joined:
        run.start()
    run.coordination.reach_collective()
    run.coordination.gather(b"")
    run.coordination.broadcast()


def attempt(
    run: Run,
    what: str,
    step: CapturedStep,
    names: Mapping[str, str],
    batch: Mapping[str, Any],
    measure: Callable[[Values, OneReplica], M],
) -> M:
    """Measures a step on one replica of this worker.

    Args:
        run: the run.
        what: name of the measurement, for the log.
        step: the captured step.
        names: the session's name of each variable.
        batch: the values of its inputs in this worker's part of the first batch; empty: not known.
        measure: makes the measurement.

    Raises:
        CannotMeasure: the step cannot be measured, for the reason in the argument. Every error is one, as a measurement
            is no reason not to train, and the others wait; only those of the cluster are raised as they are.
    """
    if not batch:
        raise CannotMeasure("its batch is not known before it runs")
    if not run.spec.workers[run.index].has_replicas:
        raise CannotMeasure("this worker has no replica")
    tracked = {one.shared_name: one for one in run.tracker}
    values = {v.name: functools.partial(_value, run, tracked[names[v.name]]) for v in step.variables}
    with run.startup.showing(f"measuring {what}"):
        try:
            measured = measure(values, OneReplica.of(run.spec.workers, run.index))
        except (CannotMeasure, ClusterError):
            raise
        except Exception as error:
            log.warning("%s could not be measured (%s: %s).", what, type(error).__name__, words_of(error))
            raise CannotMeasure(f"{type(error).__name__}: {words_of(error)}") from error
    run.startup.log_done("measured %s in %s", what, readable_seconds(measured.took))
    return measured


def _value(run: Run, tracked: TrackedVariable) -> np.ndarray:
    """Returns the present value of a variable, which an earlier step may have written."""
    if tracked.may_be_behind:
        run.pull(tracked)
    return np.asarray(tracked.read())
