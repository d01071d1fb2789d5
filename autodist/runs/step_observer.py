"""StepObserver: what a run tells of its training steps, to what saves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autodist.graph.step import Step
from autodist.runtime.variables import Kept, Tracked


class StepObserver:
    """Hears of everything and does nothing; a subclass overrides what it wants to hear of.

    All workers come to each of these calls alike, in the same order.
    """

    def on_tracked(self, item: Step, variables: Mapping[str, Tracked]) -> None:
        """A step of eager variables was captured, and has not run yet.

        Args:
            item: the step.
            variables: that it reads or writes, by their names in the step.
        """

    def on_session(self, variables: Mapping[str, Kept]) -> Mapping[str, Kept]:
        """A session is about to make its first run that trains; all its variables have values.

        Args:
            variables: all of the session's, by name.

        Returns:
            On the chief, by the name of a value in the checkpoint that the run goes on from, the variable that is to
            have it.
        """
        return {}

    def before_step(self, step: object) -> None:
        """A training step of the script's comes next.

        Args:
            step: tells this step from other ones of the script: it is the same object each time.
        """

    def after_step(self) -> None:
        """A training step was made, or several in one call."""

    def on_schedule(self, schedule: Any) -> None:
        """On the chief: from now on this schedule, too, says when the run is saved.

        Args:
            schedule: an `autodist.checkpoint.save_schedule.Schedule`.
        """
