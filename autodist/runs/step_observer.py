"""Interface through which a run notifies the code that saves checkpoints of its training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autodist.graph.step import CapturedStep
from autodist.runtime.variables import StoredVariable, TrackedVariable


class StepObserver:
    """Base class of step observers; all methods do nothing, and a subclass overrides those that it needs.

    All workers make each of these calls in the same order.
    """

    def on_tracked(self, step: CapturedStep, variables: Mapping[str, TrackedVariable]) -> None:
        """Called when a step of eager variables was captured and has not run yet.

        Args:
            step: the step.
            variables: variables that it reads or writes, by their names in the step.
        """

    def on_session(self, variables: Mapping[str, StoredVariable]) -> Mapping[str, StoredVariable]:
        """Called when a session is about to make its first training run; all its variables have values.

        Returns:
            On the chief, the variables to restore, by the name of their value in the checkpoint that the run resumes
            from.
        """
        return {}

    def before_step(self, step: object) -> None:
        """Called before a training step of the script.

        Args:
            step: identifies the step among the steps of the script: the same object each time.
        """

    def after_step(self) -> None:
        """Called after a training step, or after several in one call."""

    def on_schedule(self, schedule: Any) -> None:
        """On the chief, adds a schedule that decides when the run is saved.

        Args:
            schedule: an `autodist.checkpoint.save_schedule.Schedule`.
        """
