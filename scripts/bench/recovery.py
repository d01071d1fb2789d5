"""The time from the loss of a worker to the next step, by its parts, and the steps that are lost."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from bench.comparisons import Result
from bench.jobs import output_of

LIMIT = 900.0
MODELS = ("digits", "resnet50")
AT, EVERY = 17, 10
"""The step before which a worker is killed, and the number of steps between two checkpoints."""

OF_COLD_START = 0.5
"""Limit of the time from the noticed loss to the next step, relative to the first start."""

Mark = dict[str, Any]


@dataclass(frozen=True)
class Recovery:
    """One recovery. All times are in seconds; the parts after `noticed` add up to the time until the next step.

    Attributes:
        noticed: from the SIGKILL of a worker to the exception in the chief's script.
        ended: from there until all other workers and the chief's script have ended.
        left: from there to the first line of the chief's script in its second start: the wait before a restart, and
            the end of Python.
        imported: imports of the chief's script.
        captured: from there until the step is traced, without `restored`.
        joined: from there until all workers have joined, whose scripts start later.
        rewritten: from there to the end of the first step: the strategy, rewriting, the values, the first run.
        restored: restoring the checkpoint.
        cold: from the first line of the chief's script to the end of the first step, in the first start.
        lost_steps: number of steps that are run again.
    """

    noticed: float
    ended: float
    left: float
    imported: float
    captured: float
    joined: float
    rewritten: float
    restored: float
    cold: float
    lost_steps: float

    @property
    def seconds(self) -> float:
        """The time from the noticed loss to the end of the next step."""
        parts = self.ended, self.left, self.imported, self.captured, self.joined, self.rewritten, self.restored
        return sum(parts)

    @staticmethod
    def of(marks: Sequence[Mark]) -> Recovery:
        """Returns the recovery with these marks, which `bench.recover` has written."""
        killed = _first(marks, "killed")
        chief = sorted((mark for mark in marks if mark["is_chief"] is not False), key=lambda mark: mark["at"])
        before = [mark for mark in chief if mark["at"] < killed["at"]]
        after = [mark for mark in chief if mark["at"] >= killed["at"]]
        at = {name: _first(after, name)["at"] for name in _MOMENTS}
        step = _first(after, "step", lambda mark: mark["at"] > at["script"])
        restored = at["restored"] - at["restoring"]
        return Recovery(
            noticed=at["raised"] - killed["at"],
            ended=at["ended"] - at["raised"],
            left=at["script"] - at["ended"],
            imported=at["imported"] - at["script"],
            captured=at["traced"] - at["imported"] - restored,
            joined=at["joined"] - at["traced"],
            rewritten=step["at"] - at["joined"],
            restored=restored,
            cold=_first(before, "step")["at"] - _first(before, "script")["at"],
            lost_steps=killed["step"] - (step["step"] - 1),
        )


_MOMENTS = ("raised", "ended", "script", "imported", "restoring", "restored", "traced", "joined")


def compare_recovery(model: str, repeat: int, image: int) -> Result:
    """Compares the time to the next step after a loss with that of a first start.

    Args:
        model: one of `MODELS`.
        repeat: number of runs.
        image: width and height of an image, for ResNet50.

    Raises:
        JobError: it did not run.
    """
    runs = [astuple(_recover(model, image)) for _ in range(repeat)]
    found = Recovery(*(statistics.median(values) for values in zip(*runs, strict=True)))
    parts = ", ".join(f"{one.name} {getattr(found, one.name):.1f}" for one in fields(found)[:-2])
    return Result(
        "recovery", f"{model}, from the noticed loss to the next step", f"{found.seconds:.1f} s", f"{found.cold:.1f} s",
        found.seconds / found.cold, OF_COLD_START, f"{parts} s; {found.lost_steps:.0f} steps are run again",
    )  # fmt: skip


def _recover(model: str, image: int) -> Recovery:
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        words = (model, folder, str(AT), str(EVERY), str(image))
        output_of(f"{model}: recovery", "bench.recover", *words, limit=LIMIT, threads=None)
        lines = (Path(folder) / "marks.jsonl").read_text().splitlines()
    return Recovery.of([json.loads(line) for line in lines])


def _first(marks: Sequence[Mark], name: str, fits: Callable[[Mark], bool] = lambda mark: True) -> Mark:
    return next(mark for mark in marks if mark["mark"] == name and fits(mark))
