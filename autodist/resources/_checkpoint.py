"""The model of `checkpoint`: a folder into which what is trained is saved, and from which the next run goes on."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from autodist.resources._model import Fault, Model

_LONGEST_MINUTES = 100_000
_MOST_STEPS = 10**12

CHECKPOINT = (
    "a mapping of `folder`, `every_steps`, `every_minutes`, `keep` and `on_preempt`, such as {folder: checkpoints, "
    "every_minutes: 10}"
)


class CheckpointSection(Model):
    """Where, and how often, what is trained is saved without a line of the script.

    Attributes:
        folder: on the chief's machine; made absolute when it is read.
        every_steps: of training, after which it is saved; None: not by them.
        every_minutes: likewise, by the chief's clock.
        keep: how many checkpoints stay.
        on_preempt: whether it is saved, too, when a worker gets SIGTERM, which ends the run after that.
    """

    folder: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")] = Field(
        description="the path of a folder on the chief's machine"
    )
    every_steps: int | None = Field(
        default=None, ge=1, le=_MOST_STEPS, description="a whole number of training steps, at least 1"
    )
    every_minutes: float | None = Field(
        default=None, gt=0, le=_LONGEST_MINUTES, allow_inf_nan=False, description="a number of minutes above 0"
    )
    keep: int = Field(default=3, ge=1, le=_MOST_STEPS, description="how many checkpoints stay, at least 1")

    on_preempt: bool = Field(default=False, description="true or false")

    @field_validator("folder")
    @classmethod
    def _make_absolute(cls, path: str) -> str:
        """The script may have gone elsewhere when it is used."""
        if "://" in path:
            raise Fault(f"{path} is on no file system of a machine; allowed: the path of a folder")
        return os.path.abspath(os.path.expanduser(path))

    @model_validator(mode="after")
    def _check_saves(self) -> CheckpointSection:
        if self.every_steps is None and self.every_minutes is None and not self.on_preempt:
            raise Fault(
                "neither every_steps nor every_minutes says how often, nor is on_preempt true; allowed: one of them, "
                "or several"
            )
        return self
