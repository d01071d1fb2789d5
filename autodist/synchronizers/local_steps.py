"""Local steps: steps of each worker on its own copy of a variable, ended by an outer step of all workers."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2


@dataclass(frozen=True)
class LocalSteps:
    """Local steps, as in the strategy message.

    Attributes:
        steps: the number of training steps from one outer step to the next, from 1.
        outer_learning_rate: the learning rate of the outer step, above 0.
        outer_momentum: its Nesterov momentum, from 0 and below 1; 0 with a learning rate of 1 is the average.
    """

    steps: int
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    @classmethod
    def from_message(cls, message: strategy_pb2.LocalSteps) -> LocalSteps:
        if message.steps < 1:
            raise OptionError("local_steps", f"has {message.steps} local steps; an outer step ends 1 or more.")
        if not 0 < message.outer_learning_rate < float("inf"):
            raise OptionError(
                "outer_learning_rate",
                f"has the outer learning rate {message.outer_learning_rate:g}; use a number above 0, such as 0.7.",
            )
        if not 0 <= message.outer_momentum < 1:
            raise OptionError(
                "outer_momentum",
                f"has the outer momentum {message.outer_momentum:g}; use 0 or more, and less than 1, such as 0.9.",
            )
        return cls(message.steps, message.outer_learning_rate, message.outer_momentum)

    def to_message(self) -> strategy_pb2.LocalSteps:
        return strategy_pb2.LocalSteps(
            steps=self.steps, outer_learning_rate=self.outer_learning_rate, outer_momentum=self.outer_momentum
        )

    @property
    def text(self) -> str:
        """Description for people."""
        plain = self.outer_learning_rate == 1 and self.outer_momentum == 0
        outer = "" if plain else f" (outer {self.outer_learning_rate:g}, momentum {self.outer_momentum:g})"
        return "averaged after each step" + outer if self.steps == 1 else f"averaged every {self.steps} steps{outer}"
