"""The metrics of a run, as far as they were read, and the figures that follow from several lines."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pydantic

from autodist.cli.command_errors import UsageError
from autodist.cli.metrics.follow import NewLines
from autodist.runs.metrics.records import METRICS_FILE, PLANS_FILE, MetricsLine, PlanRecord, WorkerMetrics

_Record = TypeVar("_Record", MetricsLine, PlanRecord)


def _parsed(kind: type[_Record], texts: Iterable[str], source: str) -> list[_Record]:
    """Returns the records of lines of JSON.

    Args:
        kind: the class of the records.
        texts: the lines.
        source: their file, for messages.

    Raises:
        UsageError: a line is no such record.
    """
    try:
        return [kind.model_validate_json(text) for text in texts]
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "line"
        raise UsageError(f"{source} was not written by AutoDist's `metrics` ({where}: {first['msg']}).") from error


@dataclass
class History:
    """The lines of a run, oldest first.

    Attributes:
        lines: the lines of the metrics.
        plans: the plans of its steps.
    """

    lines: list[MetricsLine] = field(default_factory=list)
    plans: list[PlanRecord] = field(default_factory=list)

    def add(self, new: NewLines, folder: str = "") -> None:
        """Adds new lines; `folder` is that of their files, for messages.

        Raises:
            UsageError: AutoDist has not written a line.
        """
        self.lines += _parsed(MetricsLine, new.lines, os.path.join(folder, METRICS_FILE))
        self.plans += _parsed(PlanRecord, new.plans, os.path.join(folder, PLANS_FILE))

    @property
    def names(self) -> list[str]:
        """The names of the training steps."""
        return list(dict.fromkeys(line.name for line in self.lines))

    def of(self, name: str) -> list[MetricsLine]:
        """Returns the lines of a step."""
        return [line for line in self.lines if line.name == name]

    def starts_of(self, name: str) -> list[list[MetricsLine]]:
        """Returns the lines of a step, those of each start of the script together."""
        return [list(lines) for _, lines in itertools.groupby(self.of(name), key=lambda line: line.started)]

    def plan_of(self, name: str) -> PlanRecord | None:
        """Returns the latest plan of a step; None if there is none.

        A session has one plan for all its steps.
        """
        of_name = [plan for plan in self.plans if plan.name == name]
        return next(reversed(of_name or self.plans), None)

    @property
    def restarts(self) -> list[PlanRecord]:
        """The first plan of each restart, which has its reason."""
        firsts = {plan.started: plan for plan in reversed(self.plans) if plan.restarts}
        return list(reversed(firsts.values()))


def workers_of(lines: Sequence[MetricsLine]) -> list[WorkerMetrics]:
    """Returns, for each worker of the last line, its latest measurement of each kind."""
    found = []
    for index, last in enumerate(lines[-1].by_worker):
        own = [measured for measured in (_of(line, index, last.worker) for line in lines) if measured is not None]
        traced = [measured for measured in own if measured.traced is not None]
        times = traced[-1].model_dump(include={"compute", "wait", "send", "traced"}) if traced else {}
        timed = [measured for measured in own if measured.seconds is not None]
        found.append((timed or own)[-1].model_copy(update=times))
    return found


def bytes_per_step(lines: Sequence[MetricsLine], index: int) -> float | None:
    """Returns the bytes that a worker has sent in a step, between the last two lines of one start that have them."""
    last = lines[-1]
    sent = [
        (line.step, measured.bytes_sent)
        for line in lines
        if line.started == last.started
        and (measured := _of(line, index, last.by_worker[index].worker)) is not None
        and measured.bytes_sent is not None
    ]
    if len(sent) < 2:
        return None
    (earlier, before), (later, after) = sent[-2:]
    return (after - before) / (later - earlier) if later > earlier else None


def _of(line: MetricsLine, index: int, worker: str) -> WorkerMetrics | None:
    """Returns a worker's part of a line; None if another worker had its index in that start."""
    found = line.by_worker[index] if index < len(line.by_worker) else None
    return found if found is not None and found.worker == worker else None
