"""Results: what a synchronizer puts in the place of joins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from autodist.graph.parts import PendingReduction
from autodist.graph.step import Replication, Step
from autodist.graph.step_editor import StepEditor


class Results:
    """Collects what one synchronizer puts in the place of joins.

    Args:
        item: the step.
        replication: its, or what it is to be.

    Attributes:
        editor: of the step.
    """

    def __init__(self, item: Step, replication: Replication) -> None:
        self.editor = StepEditor(item)
        self._replication = replication
        self._given: dict[str, str] = {}

    def give(self, join: PendingReduction, tensors: Sequence[str]) -> None:
        """Lets all that reads the join's local result read `tensors`, which hold the sum over all workers."""
        for old, new in zip(join.result, tensors, strict=True):
            self.replace(old, new)

    def replace(self, old: str, new: str, consumers: Iterable[str] | None = None) -> None:
        """Lets `consumers` of the tensor `old`, and the step's outputs, have `new`."""
        self.editor.rewire(old, new, consumers)
        self.editor.replace_output(old, new)
        self._given[old] = new

    def now(self, name: str) -> str:
        """The tensor that took the place of a join's local result, or `name` itself."""
        return self._given.get(name, name)

    def to_item(self, joins: Collection[PendingReduction], **changes: Any) -> Step:
        """The step in which `joins` are done, with `changes` of its replication."""
        done = {id(join) for join in joins}  # compared one with another they would cost joins × joins
        left = tuple(join for join in self._replication.joins if id(join) not in done)
        return self.editor.to_item(replication=replace(self._replication, joins=left, **changes))
