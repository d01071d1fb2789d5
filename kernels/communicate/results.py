"""Results: the tensors with which a synchronizer replaces pending reductions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor


class Results:
    """Collects the tensors with which one synchronizer replaces pending reductions.

    Attributes:
        editor: the editor of the step.
    """

    def __init__(self, step: ReplicatedStep) -> None:
        self.editor = StepEditor(step)
        self._step = step
        self._replacements: dict[str, str] = {}

    def set_result(self, pending: PendingReduction, tensors: Sequence[str]) -> None:
        """Replaces the local result of a reduction by `tensors`, the result over all workers."""
        for old, new in zip(pending.result, tensors, strict=True):
            self.replace(old, new)

    def set_values(self, reductions: Iterable[PendingReduction], tensors: Iterable[str]) -> None:
        """Replaces the local results of dense reductions by a tensor each."""
        for pending, name in zip(reductions, tensors, strict=True):
            self.set_result(pending, [name])

    def replace(self, old: str, new: str, consumers: Iterable[str] | None = None) -> None:
        """Replaces the tensor `old` by `new` for `consumers` (by default all) and in the step's outputs."""
        self.editor.rewire(old, new, consumers)
        self.editor.replace_output(old, new)
        self._replacements[old] = new

    def now(self, name: str) -> str:
        """Returns the tensor that replaced a reduction's local result, or `name` itself."""
        return self._replacements.get(name, name)

    def to_step(self, reductions: Collection[PendingReduction], **changes: Any) -> ReplicatedStep:
        """Returns the step without the pending reductions `reductions`, with `changes` to its other fields."""
        done = {id(pending) for pending in reductions}  # comparing them by value would cost reductions²
        left = tuple(pending for pending in self._step.reductions if id(pending) not in done)
        return self.editor.to_step(reductions=left, **changes)
