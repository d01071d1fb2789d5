"""Outer steps: run between training steps, at the same step numbers on all workers, to average local steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from autodist.logs.formatting import counted
from autodist.runtime.program import Program, ProgramOuterStep

log = logging.getLogger("autodist")

Batch = TypeVar("Batch")


class OuterSteps:
    """The outer steps of one run. That of each n steps runs after the training steps n, 2·n, 3·n…

    Args:
        guard: wraps calls that may wait for other workers.
    """

    def __init__(self, guard: Callable[..., Any]) -> None:
        self._guard = guard
        self._by_key: dict[str, ProgramOuterStep] = {}
        self._open: dict[str, int] = {}

    def add(self, program: Program) -> None:
        """Adds those of a program. A variable belongs to one of them alone, whatever the programs that train it."""
        self._by_key.update(program.outer_steps)

    def after(self, step: int, steps: int) -> bool:
        """Runs those that are due; returns True if any has run.

        Args:
            step: number of training steps so far.
            steps: number of these that have just run; at most those until the next outer step.
        """
        self._open = {key: self._open.get(key, 0) + steps for key in self._by_key}
        return self._run([key for key, one in self._by_key.items() if step // one.every > (step - steps) // one.every])

    def end(self) -> bool:
        """Runs all whose last run was before the last training step; returns True if any has run."""
        return self._run([key for key in self._by_key if key in self._open])

    def warn_of_open_ones(self) -> None:
        """Logs that the last local steps are in no variable, at the end of a script."""
        if self._open:
            steps = counted(max(self._open.values()), "local step")
            log.warning(
                "the last %s of each worker came after the last outer step: the variables do not have them. Call "
                "ad.end_local_steps() on every worker at the end of the training.", steps,
            )  # fmt: skip

    def divide(self, batches: Sequence[Batch], step: int) -> Iterator[Sequence[Batch]]:
        """Yields batches in groups that end where an outer step is due.

        Args:
            batches: of the next training steps.
            step: number of training steps so far.
        """
        start = 0
        while start < len(batches):
            due = min((one.every - (step + start) % one.every for one in self._by_key.values()), default=len(batches))
            yield batches[start : start + due]
            start += due

    def _run(self, keys: Sequence[str]) -> bool:
        for key in keys:
            self._guard(self._by_key[key].run)
            self._open.pop(key, None)
        return bool(keys)
