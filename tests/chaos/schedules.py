"""Schedules of faults, drawn from a seed: the fault in each start of a run, and its moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_RESTARTS = 3

BAND = 3
"""Number of steps reserved for the fault of each start: no two faults are in the same step."""

STEPS = BAND * (MOST_RESTARTS + 1)

EVERY = 2
"""Number of steps between two saves of the script."""

LOSSES = ("kill at start", "kill before step", "kill in step", "kill while saving", "stop", "cut")
"""Faults by which the run loses its other worker and restarts."""

ENDINGS = ("raise", "full disk")
"""Faults that the run cannot survive: the other worker's script raises each time, or the chief cannot save."""

SHORT_CUT = "short cut"
"""A fault that the run survives without a restart."""


@dataclass(frozen=True)
class Fault:
    """The fault in one start of a run.

    Attributes:
        kind: of LOSSES or ENDINGS, or SHORT_CUT.
        step: of the fault, counted from 0; for "while saving" and "full disk", the checkpoint after it.
        delay: in seconds, counted from the step.
    """

    kind: str
    step: int
    delay: float


@dataclass(frozen=True)
class Schedule:
    """The faults of one run: one for each start, except possibly the last one."""

    seed: int
    faults: tuple[Fault, ...]

    @property
    def recovers(self) -> bool:
        """True if the run ends well."""
        return all(fault.kind not in ENDINGS for fault in self.faults)

    @property
    def restarts(self) -> int:
        """Number of restarts; a script that raises is restarted once."""
        return sum(fault.kind in (*LOSSES, "raise") for fault in self.faults)

    def __str__(self) -> str:
        return f"seed {self.seed}: " + ", ".join(f"{fault.kind} ({fault.step})" for fault in self.faults)


def draw(seed: int) -> Schedule:
    """Returns the schedule of a seed."""
    random = np.random.default_rng(seed)
    losses = int(random.integers(0, MOST_RESTARTS + 1))
    kinds: list[str] = []
    while len(kinds) < losses:
        kind = str(random.choice(LOSSES))
        if (
            kinds[-1:] != ["kill at start"] or kind != "kill at start"
        ):  # twice in a row would be one fault of the script
            kinds.append(kind)
    last = random.choice(["", SHORT_CUT, *ENDINGS], p=[0.4, 0.2, 0.2, 0.2])
    if last and not (last == "raise" and losses == MOST_RESTARTS):
        kinds.append(str(last))
    kinds = kinds or [str(random.choice(LOSSES))]
    return Schedule(seed, tuple(_fault(kind, start, random) for start, kind in enumerate(kinds)))


def _fault(kind: str, start: int, random: np.random.Generator) -> Fault:
    step = BAND * start + int(random.integers(BAND - 1))
    if kind in ("kill while saving", "full disk") and (step + 1) % EVERY:
        step = BAND * start + (step + 1) % BAND % (BAND - 1)
    return Fault(kind, step, float(random.uniform(0, 0.05)))
